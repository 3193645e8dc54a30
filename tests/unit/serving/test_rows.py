"""The rows that transforms share."""

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import Batch
from weft.serving.backends.rows import RowBackend, check_finite, check_rows


class _Doubling(RowBackend):
    """Doubles X, notes every batch that it sees, and refuses numbers that are not finite."""

    def load(self):
        self.seen = []

    def run(self, inputs, num_rows):
        self.seen.append(inputs["X"].shape)
        check_finite(inputs["X"], "X")
        return {"Y": inputs["X"] * 2}


@pytest.fixture
def doubling(make_model_context):
    """Makes a loaded backend."""

    def make(**options):
        return load_backend(_Doubling, make_model_context({"X": ("FP32", (2,))}, {"Y": ("FP32", (2,))}, **options))

    return make


def _rows(*values):
    return np.array(values, np.float32)


def test_requests_are_run_together(doubling):
    """A batch of sound requests is one run, and each gets its own rows."""
    backend = doubling()
    outcomes = execute_batch(
        backend, make_served_request(X=_rows([1, 2])), make_served_request(X=_rows([3, 4], [5, 6]))
    )
    assert [[[2, 4]], [[6, 8], [10, 12]]] == [outcome.outputs["Y"].tolist() for outcome in outcomes]
    assert [(3, 2)] == backend.seen


def test_bad_data_cost_the_batch_mates_nothing(doubling):
    """A bad row fails its own request with its own number there; all others are answered."""
    requests = [make_served_request(X=_rows([i, i])) for i in range(3)]
    bad = make_served_request(X=_rows([0, 0], [1, np.inf]))
    outcomes = execute_batch(doubling(), *requests[:2], bad, requests[2])
    assert isinstance(outcomes[2], InvalidArgumentError)
    assert "input 'X' row 1: inf at [1]; numbers must be finite" == outcomes[2].message
    assert [[[0, 0]], [[2, 2]], [[4, 4]]] == [outcomes[i].outputs["Y"].tolist() for i in (0, 1, 3)]


def test_absent_input_fails_its_own_request(doubling):
    """An input that the configuration calls optional, but the backend needs, is INVALID_ARGUMENT where it is absent."""
    present, absent = execute_batch(
        doubling(optional=("X",)), make_served_request(X=_rows([1, 2])), make_served_request()
    )
    assert [[2, 4]] == present.outputs["Y"].tolist()
    assert "input 'X' is missing; this model needs it in every request" == absent.message


def test_times_of_the_runs_stay_in_order(doubling):
    """Also after bad data a batch has the times of its execution."""
    batch = Batch([make_served_request(X=_rows([1, value])) for value in (1, np.nan)])
    doubling().execute(batch)
    assert 0 < batch.start_ns <= batch.infer_start_ns <= batch.infer_end_ns


def test_model_without_batch_dimension_has_one_row(doubling):
    """With max_batch_size 0 the backend sees one row, and the answer has no batch dimension."""
    backend = doubling(max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(X=np.array([1, 2], np.float32)))
    assert ([2, 4], [(1, 2)]) == (outcome.outputs["Y"].tolist(), backend.seen)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2)])
def test_first_bad_row_is_named(shape):
    """The first row that has anything bad is named, whatever the number of dimensions."""
    is_good = np.ones(shape, np.bool_)
    check_rows(is_good, "X", lambda row: "never asked")
    is_good[1:] = False
    with pytest.raises(InvalidArgumentError, match=r"^input 'X' row 1: number 1 is odd$"):
        check_rows(is_good, "X", lambda row: f"number {row} is odd")
