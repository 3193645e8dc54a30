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
        parts.append("  decoupled: true\n}\n" if model.decoupled else "}\n")
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
    if before.max_batch_size != now.max_batch_size:
        yield f"max_batch_size was {before.max_batch_size}, is {now.max_batch_size}"
    old, new = signature_of(before), signature_of(now)
    if old.is_decoupled != new.is_decoupled:
        yield f"decoupled was {old.is_decoupled}, is {new.is_decoupled}".lower()
    if old.is_stateful != new.is_stateful:
        yield f"stateful was {old.is_stateful}, is {new.is_stateful}".lower()
    for what, had, has in (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs)):
        yield from _tensor_differences(what, {spec.name: spec for spec in had}, {spec.name: spec for spec in has})


def _tensor_differences(what: str, had: Mapping[str, TensorSpec], has: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in dict.fromkeys([*had, *has]):
        if name not in has:
            yield f"{what} '{name}' is gone; it was {_shown(had[name])}"
        elif name not in had:
            yield f"{what} '{name}' is new: {_shown(has[name])}"
        elif had[name] != has[name]:
            yield f"{what} '{name}' was {_shown(had[name])}, is {_shown(has[name])}"


def _shown(spec: TensorSpec) -> str:
    marks = (" optional" if spec.is_optional else "") + (" ragged" if spec.allow_ragged_batch else "")
    return f"{spec.datatype}{list(spec.dims)}{marks}"
