"""Requests of a trial: recorded, of a data set, or generated; and when they arrive."""

import json
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.messages import call_from_request

from weft.base.errors import NotFoundError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import decode
from weft.capacity.tuning.load import RequestSet, arrivals, from_data, generated
from weft_protos import grpc_service_pb2 as pb

SIGNATURE = ModelSignature(
    "g", "1", "graph", 8,
    (
        TensorSpec("TEXT", "BYTES", (1,)),
        TensorSpec("IDS", "INT64", (-1,)),
        TensorSpec("MORE", "FP32", (2,), is_optional=True),
    ),
    (TensorSpec("OUT", "FP32", (1,)),),
)  # fmt: skip


def tensors(payload: bytes) -> dict[str, np.ndarray]:
    """Inputs of a serialized request."""
    call = call_from_request(pb.ModelInferRequest.FromString(payload))
    return {name: decode(tensor) for name, tensor in call.inputs.items()}


def write(path: Path, rows: Sequence[object]) -> str:
    """Rows as JSON Lines."""
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_random_requests_fit_the_signature() -> None:
    """Sizes that are open vary, optional inputs are left out, and a seed gives the same again."""
    requests = generated(SIGNATURE, rows=3, seed=5)
    shapes = [{name: array.shape for name, array in tensors(payload).items()} for payload in requests.payloads]
    assert {shape["TEXT"] for shape in shapes} == {(3, 1)}
    assert len({shape["IDS"] for shape in shapes}) > 10
    assert all(set(shape) == {"TEXT", "IDS"} for shape in shapes)
    assert requests == generated(SIGNATURE, rows=3, seed=5)
    assert requests != generated(SIGNATURE, rows=3, seed=6)


def test_rows_of_a_data_set_go_together_by_shape(tmp_path: Path) -> None:
    """At most so many in a request, only adjacent ones; a row that does not fit is left out."""
    rows = [{"TEXT": str(row), "n": [row] * (2 if row < 5 else 3)} for row in range(9)]
    path = write(tmp_path / "d.jsonl", [*rows[:2], "no JSON", *rows[2:]])
    requests = from_data(SIGNATURE, path, column_of={"IDS": "n"}, rows=2, recorded=False)
    texts = [[text.decode() for text in tensors(payload)["TEXT"][:, 0]] for payload in requests.payloads]
    assert texts == [["0", "1"], ["2", "3"], ["4"], ["5", "6"], ["7", "8"]]
    assert requests.arrivals_s == ()


def test_recorded_rows_arrive_as_they_did(tmp_path: Path) -> None:
    """From the first one on, again when they end, and at another rate if one is given."""
    times_s = (100.0, 100.5, 101.0, 103.0)
    path = write(tmp_path / "d.jsonl", [{"TEXT": "a", "IDS": [1], "at_s": at_s} for at_s in times_s])
    requests = from_data(SIGNATURE, path, column_of={}, rows=1, recorded=True)
    assert requests.arrivals_s == (0.0, 0.5, 1.0, 3.0)
    assert [at_s for at_s, _ in arrivals(requests, 0.0, 6.0, 0)] == [0.0, 0.5, 1.0, 3.0, 4.0, 4.5, 5.0]
    assert [at_s for at_s, _ in arrivals(requests, 2.0, 3.0, 0)] == [0.0, 0.25, 0.5, 1.5, 2.0, 2.25, 2.5]


def test_generated_arrivals_have_their_rate() -> None:
    """A Poisson process: gaps vary, their mean is that of the rate, and a seed gives the same again."""
    requests = RequestSet((b"a", b"b"), (), "")
    times_s = [at_s for at_s, _ in arrivals(requests, 200.0, 20.0, 3)]
    gaps = np.array([later - earlier for earlier, later in pairwise(times_s)])
    assert len(times_s) == pytest.approx(4000, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    again = arrivals(requests, 200.0, 20.0, 3)
    assert list(islice(again, 2)) == [(times_s[0], b"a"), (times_s[1], b"b")]


def test_missing_file_is_told_by_its_option(tmp_path: Path) -> None:
    """As the user wrote it."""
    with pytest.raises(NotFoundError, match=r"^--recorded '.*none' matches no file"):
        from_data(SIGNATURE, str(tmp_path / "none"), column_of={}, rows=1, recorded=True)
