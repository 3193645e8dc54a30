"""Samples: published graphs as shapes of our own; README.md says how their files are read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.compat.graphs.formulas import Arrays, Formula, formula

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
_TABLE = "| file | what shape it is | of | here |\n|---|---|---|---|\n"
_NUMBERS = re.compile(r"\[(.*)\] (\S+)(?: by (\S+))?")


@dataclass(frozen=True)
class Model:
    """A stand-in for a model of the sample: arithmetic with the original's datatypes and shapes.

    Attributes:
        answer: Outputs of inputs; of a decoupled model many of them.
        max_batch_size: 0 means that it has no batch dimension.
        versions: It has each of them; all do the same.
        fails: Every call fails with this message.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Formula
    max_batch_size: int
    versions: tuple[str, ...]
    is_decoupled: bool
    fails: str

    def signature(self, version: str) -> ModelSignature:
        """As its server tells it."""
        return ModelSignature(
            self.name, version, "python", self.max_batch_size, self.inputs, self.outputs, self.is_decoupled
        )


@dataclass
class Request:
    """A request and its answer: ``expected`` has one of several answers, or is the responses of a stream.

    Attributes:
        error: What the message of the expected error contains, in place of an answer.
        outputs: The requested ones; none means all.
        called: Every model call in the order in which it began, where the sample is about that.
    """

    inputs: Arrays
    expected: list[Arrays] = field(default_factory=list)
    is_stream: bool = False
    error: str = ""
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    called: Sequence[str] | None = None


@dataclass
class Sample:
    """A published graph.

    Attributes:
        file: In this folder: an ensemble's or a graph's ``.pbtxt``, or a ``.yaml`` for ``weft convert``.
        about: What shape it is.
        of: Project and path of the originals.
        refused: Of a graph that is refused: every code that ``weft check`` gives, or a part of what ``weft convert``
            says.
        others: Further files of the repository.
        note: A part of what the converter says to be looked at, where an answer may differ from the original's.
    """

    file: str
    about: str
    of: str = ""
    models: Sequence[Model] = ()
    requests: list[Request] = field(default_factory=list)
    refused: str = ""
    others: Sequence[str] = ()
    note: str = ""
    graph: str = ""

    @property
    def name(self) -> str:
        """The graph's name; those of Kubernetes have no underscores."""
        path = Path(self.file)
        return self.graph or (path.stem if path.suffix == ".pbtxt" else path.stem.replace("_", "-"))

    @property
    def paths(self) -> list[Path]:
        """Its files, the main one first."""
        folder = (FOLDER / self.file).parent
        return [FOLDER / self.file, *(folder / other for other in self.others)]


def split(path: Path) -> tuple[list[str], str]:
    """The comment lines at the head of a file, continued ones joined, and what follows."""
    lines = path.read_text().splitlines(keepends=True)
    num_comments = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    head = "".join(line.removeprefix("# ") for line in lines[:num_comments])
    return head.replace("\n  ", " ").splitlines(), "".join(lines[num_comments:])


def _read(path: Path) -> Sample | None:
    """The sample of a file; None of one that belongs to another's."""
    head, _ = split(path)
    if len(head) < 2:
        return None
    about, *lines = head
    known = _models(path.parent)
    sample = Sample(str(path.relative_to(FOLDER)), about, models=list(known.values()))
    for line in lines:
        key, _, text = line.partition(": ")
        if key in ("of", "refused", "note", "graph"):
            setattr(sample, key, text)
        elif key == "with":
            sample.others = text.split()
        elif key == "models":
            sample.models = [known[name] for name in text.split()]
        elif key.startswith("ask"):
            request = Request(_tensors(text))
            sample.requests += [request] * (1 if key == "ask" else int(key.split()[1]))
        else:
            _add(request, key, text)
    return sample


def _add(request: Request, key: str, text: str) -> None:
    if key in ("get", "or", "next"):
        request.is_stream |= key == "next"
        request.expected += [_tensors(text)] if text != "nothing" else []
    elif key == "only":
        request.outputs = text.split()
    elif key == "error":
        request.error = text
    elif key == "parameters":
        request.parameters = json.loads(text)
    elif key == "called":
        words = (word.partition("*") for word in text.split())
        request.called = [name for name, _, count in words for _ in range(int(count or 1))]
    else:
        raise ValueError(f"{key!r} is not known")


def _tensors(text: str) -> Arrays:
    """``NAME = DATATYPE VALUES; ...``, where values are JSON, or ``[SHAPE] FIRST by STEP``."""
    pairs = (item.partition(" = ") for item in text.split("; ")) if text != "nothing" else ()
    return {name: _tensor(*re.fullmatch(r"(\w+)(.*)", value).groups()) for name, _, value in pairs}  # type: ignore[union-attr]


def _tensor(datatype: str, values: str) -> np.ndarray:
    if found := _NUMBERS.fullmatch(values):
        shape, first, step = found.groups()
        sizes = tuple(map(int, shape.split(",")))
        numbers = float(first) + float(step or 0) * np.arange(np.prod(sizes)).reshape(sizes)
        return numbers.astype(NUMPY_BY_DATATYPE[datatype])
    read = json.loads(values)
    if datatype != "BYTES":
        return np.array(read, NUMPY_BY_DATATYPE[datatype])
    return np.vectorize(lambda text: text.encode(), otypes=[object])(np.array(read, object))


@cache
def _models(folder: Path) -> Mapping[str, Model]:
    """Models of a folder's ``models.txt`` by the word of the first column; what follows a dot is not of the name."""
    found = {}
    for line in (folder / "models.txt").read_text().splitlines()[1:]:
        key, inputs, outputs, options, does = (cell.strip() for cell in line.split("|"))
        number = re.search(r"(\d+) rows", options)
        versions = re.search(r"versions ([\d ]+)", options)
        fails = does.removeprefix("fails ") if does.startswith("fails ") else ""
        outs = _specs(outputs)
        found[key] = Model(
            key.partition(".")[0],
            _specs(inputs),
            outs,
            formula("nothing" if fails else does, outs),
            int(number[1]) if number else 0,
            tuple(versions[1].split()) if versions else ("1",),
            "decoupled" in options,
            fails,
        )
    return found


def _specs(text: str) -> tuple[TensorSpec, ...]:
    return tuple(_spec(*item.rsplit(":", 2)) for item in text.split())


def _spec(name: str, datatype: str, dims: str) -> TensorSpec:
    sizes = tuple(map(int, dims.split(","))) if dims else ()
    return TensorSpec(name.removesuffix("?"), datatype, sizes, name.endswith("?"))


def table() -> str:
    """The index of the README: one row for each sample."""
    return _TABLE + "".join(_rows())


def _rows() -> Iterator[str]:
    for sample in SAMPLES:
        status = f"refused: {sample.refused}" if sample.refused else "runs, marked `# CHECK`" if sample.note else "runs"
        of = sample.of.replace("triton-inference-server/", "")
        yield f"| `{sample.file}` | {sample.about} | {of} | {status} |\n"


SAMPLES = [
    sample
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in (".pbtxt", ".yaml") and (sample := _read(path)) is not None
]

if __name__ == "__main__":  # writes the index anew
    README.write_text(re.sub(re.escape(_TABLE) + r"(\|.*\n)*", lambda _: table(), README.read_text()))
