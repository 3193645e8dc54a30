"""Requests of random graphs, and a runtime whose decisions depend on nothing but the graph."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.random_graphs import WIDTH

from weft.base.tensors import WireTensor
from weft.router.target import RetryBudget
from weft.router.tensors import without_batch


class BoundlessBudget(RetryBudget):
    """Allows any number of retries."""

    def take(self) -> bool:
        return True


def policies() -> dict[str, Any]:
    """Options of a runtime whose retries depend on nothing but the graph."""
    return {
        "node_budget": BoundlessBudget(),
        "generator": FakeRandom(0.5),
    }


def inputs_of(seed: int, num_rows: int, *, has_extra: bool) -> dict[str, list[bytes]]:
    """Rows of the graph's inputs."""
    names = ("X", "E") if has_extra else ("X",)
    return {
        name: [blake2b(f"{name}{seed}{row}".encode(), digest_size=WIDTH).digest() for row in range(num_rows)]
        for name in names
    }


def wired(inputs: Mapping[str, list[bytes]], *, is_batched: bool = True) -> dict[str, WireTensor]:
    """The same as tensors; of one row without a batch dimension, if there is none."""
    tensors = {name: WireTensor("UINT8", (len(rows), WIDTH), b"".join(rows)) for name, rows in inputs.items()}
    return tensors if is_batched else {name: without_batch(tensor) for name, tensor in tensors.items()}
