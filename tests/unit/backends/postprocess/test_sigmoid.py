"""The ``sigmoid`` transform against scipy."""

import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError

LABELS = ["news", "sport", "größe", "art"]
OUTPUTS = {
    "PROBS": ("FP32", (4,)),
    "TOP_PROBS": ("FP32", (4,)),
    "INDEX": ("INT64", (4,)),
    "LABEL": ("BYTES", (4,)),
    "COUNT": ("INT64", (1,)),
}


@pytest.fixture
def sigmoid(version_folder, make_model_context):
    """Makes a loaded transform over four classes."""
    (version_folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")

    def make(outputs=OUTPUTS, **options):
        return load_backend(BACKENDS["sigmoid"], make_model_context({"SCORES": ("FP32", (4,))}, outputs, **options))

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_probabilities_are_those_of_scipy(sigmoid, temperature):
    """PROBS equal scipy's expit, also far from 0 and at infinity."""
    scores = (np.random.default_rng(0).normal(size=(9, 4)) * 30).astype(np.float32)
    scores[0] = [np.inf, -np.inf, 3e38, -3e38]
    (outcome,) = execute_batch(sigmoid(temperature=str(temperature)), make_served_request(SCORES=scores))
    expected = scipy.special.expit(scores.astype(np.float64) / temperature)
    np.testing.assert_allclose(outcome.outputs["PROBS"], expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("threshold", ["0.5", "0.9", "0.1,0.2,0.99,0.5"])
def test_listed_classes_are_those_of_a_loop(sigmoid, threshold):
    """Each row lists the classes that reach their threshold, best first, and then nothing."""
    scores = (np.random.default_rng(1).normal(size=(25, 4)) * 2).astype(np.float32)
    (outcome,) = execute_batch(sigmoid(threshold=threshold), make_served_request(SCORES=scores))
    outputs = outcome.outputs
    limits = [float(number) for number in threshold.split(",")] * (1 if "," in threshold else 4)
    for row, probabilities in enumerate(outputs["PROBS"]):
        reached = [c for c in range(4) if probabilities[c] >= np.float32(limits[c])]
        listed = sorted(reached, key=lambda c: -probabilities[c])
        rest = 4 - len(listed)
        assert [len(listed)] == outputs["COUNT"][row].tolist()
        assert listed + [-1] * rest == outputs["INDEX"][row].tolist()
        assert [LABELS[c].encode() for c in listed] + [b""] * rest == outputs["LABEL"][row].tolist()
        assert [probabilities[c] for c in listed] + [0] * rest == outputs["TOP_PROBS"][row].tolist()


def test_threshold_itself_is_enough(sigmoid):
    """A probability of just the threshold is listed."""
    backend = sigmoid({"COUNT": ("INT64", (1,))})
    (outcome,) = execute_batch(backend, make_served_request(SCORES=np.array([[0, -1e-6, 0, -9]], np.float32)))
    assert [[2]] == outcome.outputs["COUNT"].tolist()


def test_top_k_limits_the_list(sigmoid):
    """Of more classes than top_k the best are listed, and COUNT counts those."""
    backend = sigmoid({"INDEX": ("INT64", (2,)), "COUNT": ("INT64", (1,))}, top_k="2")
    (outcome,) = execute_batch(backend, make_served_request(SCORES=np.array([[1, 4, 2, 3]], np.float32)))
    assert ([[1, 3]], [[2]]) == tuple(array.tolist() for array in outcome.outputs.values())


def test_score_that_is_no_number_fails_its_request(sigmoid):
    """NaN is INVALID_ARGUMENT with its place, for its own request alone."""
    scores = np.zeros((2, 4), np.float32)
    broken = scores.copy()
    broken[1, 2] = np.nan
    good, failed = execute_batch(sigmoid(), make_served_request(SCORES=scores), make_served_request(SCORES=broken))
    assert isinstance(failed, InvalidArgumentError)
    assert "input 'SCORES' row 1: nan at [2]; send numbers" == failed.message
    np.testing.assert_array_equal(good.outputs["PROBS"], 0.5)
