"""A graph file as what can be run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class GraphOfFile:
    """A graph of a repository, by its text."""

    name: str
    text: str
    repository: Path | None
    version: int = 1
    catalog: Any = None
    graphs: Sequence[Any] = ()
    message: Any = None
