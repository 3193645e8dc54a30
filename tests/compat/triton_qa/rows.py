"""What runs: one row per start of the mesh, after the test.sh of Triton's folders."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.compat.triton_qa.repositories import Repository


@dataclass(frozen=True)
class Row:
    """A test file of one folder, and the mesh that it calls.

    Attributes:
        folder: In ``qa``.
        test: File in it.
        models: Fills the model repository.
        title: Tells the rows of a folder apart.
        cases: ``Class.test``; none: all of the file.
        options: Of ``weft up``.
        environment: Of the tests.
        server_environment: Of the mesh.
        differs: Cases that fail, by regular expression of their whole name, and why.
    """

    folder: str
    test: str
    models: Callable[[Repository], None]
    title: str = ""
    cases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server_environment: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)

    def allows(self, case: str) -> str:
        """Why a case may fail; "": it may not."""
        return next((why for pattern, why in self.differs.items() if re.fullmatch(pattern, case)), "")


SHM: Final = ("--allow-client-shm", "--service-args=model=--allow-client-shm")
EXPLICIT: Final = ("--model-control-mode=explicit", "--load-model=*")


def adds(*patterns: str, name: str = "") -> Callable[[Repository], None]:
    """A repository of these models (``Repository.add``)."""
    return lambda repository: repository.add(*patterns, name=name)


#: Folders that are not run, and why.
NOT_RUN: Final = {}
