"""What the compiler is given: the file, the models that exist, the other graphs."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import Diagnostic, render


@dataclass(frozen=True, slots=True)
class GraphSource:
    """One graph file.

    Attributes:
        text: Content of ``graph.pbtxt`` or of an ensemble's ``config.pbtxt``; bytes are UTF-8.
        name: Name of the graph; "" takes the name that the file gives.
    """

    text: str | bytes
    file: str
    name: str = ""
    version: str = "1"


class ModelCatalog(Protocol):
    """The models that targets serve now."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Name of the target that serves the model, and its signature; version "" means the default one."""

    def names(self) -> list[str]:
        """Every model name, to suggest one for a misspelt name."""


@runtime_checkable
class ModelFaults(Protocol):
    """What a catalog may offer beside: why models that are there are not served."""

    def fault(self, model_name: str) -> str:
        """Why a model that ``find`` does not have is not served; "" where it is not there, or nothing is known."""


class GraphLookup(Protocol):
    """The other graphs of the repository."""

    def find(self, name: str, version: str) -> GraphSource | None:
        """The graph's file; version "" means the latest."""

    def names(self) -> list[str]:
        """Every graph name, to suggest one for a misspelt name."""


class GraphError(InvalidArgumentError):
    """A graph cannot be loaded. INVALID_ARGUMENT; the message shows every error with its place."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = diagnostics
        super().__init__(render(found for found in diagnostics if found.severity == "error"))
