"""What is sent, and by how many connections and streams."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import buckets, requests
from weft.base.tensors import Array

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "model_repository"
#: 150,000 numbers of four bytes.
_NUM_LARGE = 150_000
_NUM_TEXTS = 64
#: Where a Python model runs. Without it each has a process of its own, as in Triton Inference Server.
_EXECUTION = 'parameters { key: "EXECUTION"'


class Shape(NamedTuple):
    """Requests in work at once: so many streams on each of so many connections."""

    num_connections: int
    num_streams: int

    @property
    def num_inflight(self) -> int:
        """Over all connections."""
        return self.num_connections * self.num_streams

    def __str__(self) -> str:
        return f"{self.num_connections}x{self.num_streams}"


SHAPES = (Shape(1, 1), Shape(1, 8), Shape(4, 8), Shape(4, 32))


@dataclass(frozen=True)
class Payload:
    """One request of a model, as arrays and as bytes."""

    model: str
    inputs: dict[str, Array]

    @cached_property
    def data(self) -> bytes:
        """A serialized ``ModelInferRequest``."""
        return requests.serialize(self.model, self.inputs)


class Workload(NamedTuple):
    """Requests for one model.

    Attributes:
        name: For ``--only`` and the table.
        model: Model or graph; it has the same name on every server.
        make_payloads: Its requests.
        repository: Key of ``REPOSITORIES``.
        shapes: What it is measured with.
        with_floors: Whether bare servers, which give back the request, are measured beside it.
        is_mixed: Whether the requests differ, so that a sender of one request alone takes no part.
    """

    name: str
    model: str
    make_payloads: Callable[[], list[Payload]]
    repository: str
    shapes: tuple[Shape, ...] = SHAPES
    with_floors: bool = False
    is_mixed: bool = False

    def __str__(self) -> str:
        return self.name


def _rows(model: str, num_columns: int) -> list[Payload]:
    row = np.random.default_rng(requests.SEED).normal(size=(1, num_columns)).astype(np.float32)
    return [Payload(model, {"INPUT0": row})]


def _texts() -> list[Payload]:
    """Texts of 5 to 200 words."""
    texts = requests.texts(_NUM_TEXTS)
    return [Payload("embed", {"TEXT": np.array([[text]], dtype=np.object_)}) for text in texts]


IDENTITY, IDENTITY3, LARGE, LARGE_IN, TEXTS = WORKLOADS = (
    Workload("identity", "identity_py", lambda: _rows("identity_py", 16), "identity", with_floors=True),
    Workload("identity3", "identity3_py", lambda: _rows("identity3_py", 16), "identity"),
    Workload("600 kB", "identity_any_py", lambda: _rows("identity_any_py", _NUM_LARGE), "identity", with_floors=True),
    Workload("600 kB, small answer", "sum_py", lambda: _rows("sum_py", _NUM_LARGE), "identity"),
    Workload("MiniLM texts", "embed", _texts, "embed", shapes=(Shape(1, 1), Shape(4, 8)), is_mixed=True),
)


class Repository(NamedTuple):
    """The same models for both servers."""

    weft: Path
    tis: Path


def _write_identity(folder: Path) -> Repository:
    """Models of ``tis_repository``, which both servers read, and an identity for rows of any length."""
    source = ROOT / "benchmarks" / "tis_repository"
    for model in ("identity_py", "identity3_py", "sum_py"):
        shutil.copytree(source / model, folder / model, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(folder / "identity_py", folder / "identity_any_py")
    config = folder / "identity_any_py" / "config.pbtxt"
    config.write_text(
        config.read_text().replace("identity_py", "identity_any_py").replace("dims: [ 16 ]", "dims: [ -1 ]")
    )
    return Repository(folder, folder)


def _write_embed(folder: Path) -> Repository:
    """What the sample graph ``embed`` needs; and the same in one python model."""
    buckets.write_repository(SAMPLES, folder, "buckets")
    return Repository(folder, ROOT / "benchmarks" / "tis_embed")


REPOSITORIES: dict[str, Callable[[Path], Repository]] = {"identity": _write_identity, "embed": _write_embed}


def write_repository(key: str, folder: Path, *, as_users_write: bool) -> Repository:
    """The models of ``REPOSITORIES[key]``, with ``as_users_write`` without the parameter that only Weft knows."""
    repository = REPOSITORIES[key](folder)
    for config in folder.rglob("config.pbtxt") if as_users_write else ():
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if not line.startswith(_EXECUTION)))
    return repository


def chosen(texts: Sequence[str]) -> list[Workload]:
    """The workloads whose name has one of the texts; all without a text."""
    return [workload for workload in WORKLOADS if not texts or any(text in workload.name for text in texts)]
