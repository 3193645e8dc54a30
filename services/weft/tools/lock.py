"""Lock files: signatures of models as text that is readable in a diff."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.base.repository.layout import version_order
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.text.pbtxt import PbtxtError, diagnostic, parse
from weft.base.text.pbtxt_writer import one_line
from weft.router.repository.config import signature_of
from weft_protos import graph_service_pb2 as pb

HEADER = """\
# Signatures of the models that graphs call, as their services told them. Written by weft lock; not to be edited.
# Check graphs against it, without a service:  weft check --lock {file} GRAPHS
# See whether the services have changed:       weft lock --check {file} {source}
# Renew it:                                    weft lock -o {file} {source}
"""


def lock_text(models: Iterable[pb.ModelSignature], file: str, source: str) -> str:
    """Content of a lock file.

    Args:
        file: Name of the file, for the header.
        source: Arguments of ``weft lock`` that lead to the services, for the header.
    """
    parts = [HEADER.format(file=file, source=source)]
    for model in models:
        identity = pb.ModelSignature(name=model.name, version=model.version, target=model.target)
        parts.append(f"\nmodel {{\n  {one_line(identity)} max_batch_size: {model.max_batch_size}\n")
        parts += [f"  input {{ {one_line(tensor)} }}\n" for tensor in model.input]
        parts += [f"  output {{ {one_line(tensor)} }}\n" for tensor in model.output]
        flags = pb.ModelSignature(decoupled=model.decoupled, stateful=model.stateful)
        flags.optional_output.extend(model.optional_output)
        text = one_line(flags)
        parts.append(f"  {text}\n}}\n" if text else "}\n")
    return "".join(parts)


def read_lock(path: Path) -> list[pb.ModelSignature]:
    """The models of a lock file.

    Raises:
        OSError: It cannot be read.
        PbtxtError: It is not a lock file, or has a model version twice or incomplete.
    """
    lock, positions = parse(path.read_bytes(), pb.SignatureLock(), file=str(path))
    seen: set[tuple[str, str]] = set()
    faults = []
    for i, model in enumerate(lock.model):
        key = (model.name, model.version)
        text = ""
        if not (model.name and model.version.isdecimal() and model.target):
            text = "a model needs name, version (a number) and target"
        elif key in seen:
            text = f"model '{model.name}' version {model.version} is there twice"
        seen.add(key)
        if text:
            faults.append(diagnostic(str(path), positions, positions.find(f"model[{i}]"), text))
    if faults:
        raise PbtxtError(faults)
    return list(lock.model)


class StaticCatalog:
    """A catalog of models that never changes, for lock files and repositories.

    Attributes:
        repository: Where the models are; None if that is not known.
    """

    repository: Path | None = None

    def __init__(self) -> None:
        self._models: dict[str, dict[int, tuple[str, ModelSignature]]] = {}

    def add(self, name: str, version: int, target: str, signature: ModelSignature) -> None:
        """Add a version of a model."""
        self._models.setdefault(name, {})[version] = (target, signature)

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Target and signature of a model; version "" means the highest."""
        versions = self._models.get(model_name, {})
        return versions.get(version_order(version) if version else max(versions, default=0))

    def names(self) -> list[str]:
        """Every model name."""
        return list(self._models)


class LockCatalog(StaticCatalog):
    """The models of a lock file.

    Raises:
        OSError: It cannot be read.
        PbtxtError: It is not a lock file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        for model in read_lock(path):
            self.add(model.name, int(model.version), model.target, signature_of(model))


def drift(locked: Sequence[pb.ModelSignature], live: Sequence[pb.ModelSignature]) -> list[str]:
    """Differences between the services and a lock file, one per line; empty if there are none."""
    before, now = _by_version(locked), _by_version(live)
    lines = []
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key[0], version_order(key[1]))):
        label = f"model '{key[0]}' version {key[1]}"
        if key not in now:
            lines.append(f"{label}: no target serves it any more; it was on '{before[key].target}'")
        elif key not in before:
            lines.append(f"{label}: is new, on '{now[key].target}'")
        else:
            lines += [f"{label}: {text}" for text in _differences(before[key], now[key])]
    return lines


def _by_version(models: Iterable[pb.ModelSignature]) -> dict[tuple[str, str], pb.ModelSignature]:
    return {(model.name, model.version): model for model in models}


def _differences(before: pb.ModelSignature, now: pb.ModelSignature) -> Iterator[str]:
    if before.target != now.target:
        yield f"was on target '{before.target}', is on '{now.target}'"
    yield from (text for text, _ in signature_changes(signature_of(before), signature_of(now)))


def signature_changes(old: ModelSignature, new: ModelSignature) -> Iterator[tuple[str, bool]]:
    """What clients of ``old`` meet at ``new``, and whether it breaks them: their requests fail, or answers surprise."""
    rows = old.max_batch_size, new.max_batch_size
    for what, had, has, breaks in (
        ("max_batch_size", *rows, rows[1] < rows[0] or not rows[0]),
        ("decoupled", old.is_decoupled, new.is_decoupled, not new.can_collect),
        ("stateful", old.is_stateful, new.is_stateful, True),
        ("allows_empty_batch", old.allows_empty_batch, new.allows_empty_batch, old.allows_empty_batch),
    ):
        if had != has:
            yield f"{what} was {had}, is {has}".lower(), breaks
    for what, before, after in (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs)):
        yield from _tensor_changes(what, {spec.name: spec for spec in before}, {spec.name: spec for spec in after})


def _tensor_changes(
    what: str, had: Mapping[str, TensorSpec], has: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, bool]]:
    is_input = what == "input"
    for name in dict.fromkeys([*had, *has]):
        if name not in has:
            yield f"{what} '{name}' is gone; it was {type_text(had[name])}", True
        elif name not in had:
            yield f"{what} '{name}' is new: {type_text(has[name])}", is_input and not has[name].is_optional
        elif had[name] != has[name]:
            given, taken = (had[name], has[name]) if is_input else (has[name], had[name])
            yield f"{what} '{name}' was {type_text(had[name])}, is {type_text(has[name])}", not _takes(taken, given)


def _takes(taken: TensorSpec, given: TensorSpec) -> bool:
    """Whether every tensor that fits ``given`` fits ``taken`` too."""
    if taken.datatype != given.datatype or len(taken.dims) != len(given.dims):
        return False
    sizes = zip(taken.dims, given.dims, strict=True)
    return (taken.is_optional or not given.is_optional) and all(size in (-1, other) for size, other in sizes)


def type_text(spec: TensorSpec) -> str:
    """``FP32[3] optional``, without the batch dimension."""
    marks = (" optional" if spec.is_optional else "") + (" ragged" if spec.allow_ragged_batch else "")
    return f"{spec.datatype}{list(spec.dims)}{marks}"
