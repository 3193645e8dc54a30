"""What a sample is: a graph, models that it calls, requests, and what must come back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.signature import ModelSignature, TensorSpec

FOLDER = Path(__file__).parent
Arrays = Mapping[str, np.ndarray]


class Given(dict[str, np.ndarray]):
    """Inputs of a model call, and its parameters."""

    def __init__(self, inputs: Arrays, parameters: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.parameters = parameters


@dataclass(frozen=True)
class Model:
    """A stand-in for a model of the sample: arithmetic with the original's datatypes and shapes.

    Attributes:
        name: Model name.
        inputs, outputs: Tensors as ``NAME:DATATYPE:DIMS``, separated by spaces; ``NAME?`` may be absent. A model that
            leaves out an output declares it so, too.
        answer: Outputs of inputs. Of a decoupled model a generator of them.
        max_batch_size: 0 means that it has no batch dimension.
        versions: It has each of them; all do the same.
        is_decoupled: Any number of responses.
        fails: Every call fails with this message.
    """

    name: str
    inputs: str
    outputs: str
    answer: Callable[[Given], Any] = lambda x: {}
    max_batch_size: int = 0
    versions: tuple[str, ...] = ("1",)
    is_decoupled: bool = False
    fails: str = ""

    def signature(self, version: str) -> ModelSignature:
        """As its server tells it."""
        inputs, outputs = _specs(self.inputs), _specs(self.outputs)
        return ModelSignature(self.name, version, "python", self.max_batch_size, inputs, outputs, self.is_decoupled)


@dataclass(frozen=True)
class Request:
    """A request and its expected answer.

    Attributes:
        inputs: By name.
        expected: Outputs by name, none beside them; of a decoupled graph a list of them, one for each response; of a
            graph that draws lots a tuple, of which one must come.
        error: What the message of the expected error contains, in place of an answer.
        outputs: The requested ones; none means all.
        parameters, headers: Of the request.
        called: Every model call in the order in which it began, where the sample is about that.
        is_any_order: Responses of a stream may come in any order.
    """

    inputs: Arrays
    expected: Any = None
    error: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    called: Sequence[str] | None = None
    is_any_order: bool = False


@dataclass(frozen=True)
class Shape:
    """A published graph, as a shape of our own writing.

    Attributes:
        file: In this folder: an ensemble's or a graph's ``.pbtxt``, or a ``.yaml`` for ``weft convert``.
        source: Project and path of the original; several of one shape are separated by commas.
        models: What it calls.
        requests: With their answers.
        refused: Of a graph that is refused: every code that ``weft check`` gives, or a part of what ``weft convert``
            says.
        others: Further files of the repository.
        check: A part of what the converter says to be looked at, where an answer may differ from the original's.
        graph: Served under this name; "" is that of the file.
    """

    file: str
    source: str
    models: Sequence[Model] = ()
    requests: Sequence[Request] = ()
    refused: str = ""
    others: tuple[str, ...] = ()
    check: str = ""
    graph: str = ""

    @property
    def name(self) -> str:
        """The graph's name; those of Kubernetes have no underscores."""
        path = Path(self.file)
        return self.graph or (path.stem if path.suffix == ".pbtxt" else path.stem.replace("_", "-"))

    @property
    def about(self) -> str:
        """What shape it is: the comment at the head of its file."""
        first, *_ = (FOLDER / self.file).read_text().splitlines()
        return first.removeprefix("# ")

    @property
    def paths(self) -> Iterator[Path]:
        """Its files, the main one first."""
        folder = (FOLDER / self.file).parent
        return iter([FOLDER / self.file, *(folder / other for other in self.others)])


def _specs(text: str) -> tuple[TensorSpec, ...]:
    return tuple(_spec(*item.rsplit(":", 2)) for item in text.split())


def _spec(name: str, datatype: str, dims: str) -> TensorSpec:
    sizes = tuple(map(int, dims.split(","))) if dims else ()
    return TensorSpec(name.removesuffix("?"), datatype, sizes, name.endswith("?"))


def floats(*values: Any) -> np.ndarray:
    """An FP32 tensor."""
    return np.array(values, np.float32)


def integers(*values: Any) -> np.ndarray:
    """An INT32 tensor."""
    return np.array(values, np.int32)


def texts(*values: Any) -> np.ndarray:
    """A BYTES tensor; nested lists make further dimensions."""
    return np.vectorize(lambda text: text.encode(), otypes=[object])(np.array(values, object))
