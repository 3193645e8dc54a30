"""Rows of a shard as requests, and their answers."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.signature import TensorSpec
from weft.base.tensors import Array, WireTensor, decode
from weft.jobs.dataset import Shard
from weft.jobs.layout import Layout
from weft.jobs.output import FailedRow
from weft.jobs.shard import run_shard
from weft.jobs.target import RowsFailed
from weft.jobs.window import Window

X = TensorSpec("X", "INT32", (-1,))
LAYOUT = Layout((X,), {"X": "x"}, (TensorSpec("Y", "INT32", (-1,)),), frozenset(), ("id",), True, 4)


class _Server:
    """Answers with the inputs; fails a request that has a negative number in it."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []

    async def send(self, inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
        value = decode(inputs["X"])
        self.requests.append(value[:, 0].tolist())
        if (value < 0).any():
            raise RowsFailed(InvalidArgumentError("negative"), "root>a")
        return {"Y": value}


def _shard(values: Sequence[object]) -> Shard:
    return Shard(3, 100, len(values), "in.jsonl", {"x": list(values), "id": [f"n{i}" for i in range(len(values))]})


def test_the_rows_at_fault_are_found_by_halves() -> None:
    """Of a request that fails, the rows at fault fail with status and path, and all others are answered in order."""
    server = _Server()
    shard = _shard([[1], [-2], [3], [4], [5]])
    columns, failed = asyncio.run(run_shard(shard, LAYOUT, server.send))
    assert columns["Y"].to_pylist() == [[1], [3], [4], [5]]
    assert columns["row"].to_pylist() == [100, 102, 103, 104]
    assert columns["id"].to_pylist() == ["n0", "n2", "n3", "n4"]
    assert failed == [FailedRow(101, "in.jsonl", "INVALID_ARGUMENT", "negative", "root>a", {"id": "n1"})]
    assert sorted(server.requests) == [[-2], [1], [1, -2], [1, -2, 3, 4], [3, 4], [5]]


def test_no_more_requests_are_in_flight_than_the_window_lets_through() -> None:
    """Of ten requests at most three at once, in their order; each row is answered once, also those of halves."""
    server, now, most = _Server(), 0, 0

    async def send(inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        on_busy()  # refused once
        await asyncio.sleep(0)
        now -= 1
        return await server.send(inputs, on_busy)

    shard = _shard([[row if row != 17 else -1] for row in range(40)])
    columns, failed = asyncio.run(run_shard(shard, LAYOUT, send, Window(3, time.monotonic_ns)))
    assert (most, [row.row for row in failed]) == (3, [117])
    assert columns["Y"].to_pylist() == [[row] for row in range(40) if row != 17]
    whole = [rows for rows in server.requests if len(rows) == 4]
    assert whole == sorted(whole)


def test_requests_have_rows_of_one_shape() -> None:
    """Adjacent rows of equal shapes go together, as many as a request may have; rows without a value go nowhere."""
    server = _Server()
    shard = _shard([[0], [1], [2, 2], None, [4, 4], [5], [6], [7], [8], [9]])
    columns, failed = asyncio.run(run_shard(shard, LAYOUT, server.send))
    assert sorted(server.requests) == [[0, 1], [2, 4], [5, 6, 7, 8], [9]]
    assert [row.row for row in failed] == [103]
    assert len(columns["Y"]) == 9


def test_a_shard_of_bad_rows_alone_makes_no_request() -> None:
    """Its part has no row, and every row is among those that failed."""
    server = _Server()
    columns, failed = asyncio.run(run_shard(_shard([None, "x"]), LAYOUT, server.send))
    assert (server.requests, len(columns["row"]), len(failed)) == ([], 0, 2)


def test_an_answer_that_is_no_text_fails_its_row() -> None:
    """Bytes that are not UTF-8 fail their row with the cure; as binary they are kept."""
    text = TensorSpec("Y", "BYTES", (1,))

    async def send(inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
        texts = [b"\xff" if number == 1 else b"ok" for number in decode(inputs["X"])[:, 0]]
        return {"Y": np.array(texts, np.object_)[:, None]}

    layout = Layout((X,), {"X": "x"}, (text,), frozenset(), (), True, 4)
    columns, failed = asyncio.run(run_shard(_shard([[0], [1], [2]]), layout, send))
    assert columns["Y"].to_pylist() == ["ok", "ok"]
    assert "--binary" in failed[0].message
    binary = Layout((X,), {"X": "x"}, (text,), frozenset({"Y"}), (), True, 4)
    assert asyncio.run(run_shard(_shard([[0], [1], [2]]), binary, send)).columns["Y"].to_pylist() == [
        b"ok",
        b"\xff",
        b"ok",
    ]


def test_what_stops_a_job_stops_the_shard() -> None:
    """An error that says nothing of the rows ends the shard; nothing of it is returned."""

    async def send(inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
        raise UnavailableError("gone")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_shard(_shard([[1]]), LAYOUT, send))
    assert caught.group_contains(UnavailableError)
