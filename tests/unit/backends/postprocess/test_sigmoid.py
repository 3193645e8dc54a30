"""The ``sigmoid`` transform against scipy."""

import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS

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
