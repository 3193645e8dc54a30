"""The ``softmax`` transform against scipy."""

import ml_dtypes
import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.backends.postprocess.classifier import top_k

LABELS = ["cat", "dog", "bird", "fish", "größe"]
INPUT = {"SCORES": ("FP32", (5,))}


def _outputs(top_k=2):
    return {
        "PROBS": ("FP32", (5,)),
        "TOP_PROBS": ("FP32", (top_k,)),
        "INDEX": ("INT64", (top_k,)),
        "LABEL": ("BYTES", (top_k,)),
    }


@pytest.fixture
def labels_file(version_folder):
    """``labels.txt`` in the model's folder."""
    path = version_folder.parent / "labels.txt"
    path.write_text("\n".join(LABELS) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def softmax(make_model_context, labels_file):
    """Makes a loaded transform over five classes."""

    def make(outputs=None, **options):
        model = make_model_context(INPUT, outputs or _outputs(int(options.get("top_k", 1))), **options)
        return load_backend(BACKENDS["softmax"], model)

    return make


@pytest.mark.parametrize("temperature", ["1", "0.5", "3"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_probabilities_are_those_of_scipy(softmax, top_k, temperature):
    """PROBS, TOP_PROBS, INDEX and LABEL agree with scipy's softmax and a sort."""
    scores = (np.random.default_rng(0).normal(size=(7, 5)) * 20).astype(np.float32)
    expected = scipy.special.softmax(scores.astype(np.float64) / float(temperature), axis=1)
    order = np.argsort(-expected, axis=1)[:, :top_k]
    (outcome,) = execute_batch(softmax(top_k=str(top_k), temperature=temperature), make_served_request(SCORES=scores))
    outputs = outcome.outputs
    np.testing.assert_allclose(outputs["PROBS"], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(outputs["TOP_PROBS"], np.take_along_axis(expected, order, 1), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(outputs["INDEX"], order)
    assert [[LABELS[i].encode() for i in row] for row in order] == outputs["LABEL"].tolist()
    assert ["float32", "float32", "int64", "object"] == [str(array.dtype) for array in outputs.values()]


def test_entropy_is_that_of_scipy(softmax):
    """ENTROPY is scipy's entropy of the probabilities in nats, also where some are 0."""
    scores = (np.random.default_rng(0).normal(size=(9, 5)) * 3).astype(np.float32)
    scores[0], scores[1] = 0, [0, -np.inf, -np.inf, -np.inf, -np.inf]
    outputs = {"PROBS": ("FP32", (5,)), "ENTROPY": ("FP32", (1,))}
    (outcome,) = execute_batch(softmax(outputs), make_served_request(SCORES=scores))
    expected = scipy.stats.entropy(scipy.special.softmax(scores.astype(np.float64), axis=1), axis=1)
    np.testing.assert_allclose(outcome.outputs["ENTROPY"][:, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_classes", [5, 64, 1000])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_best_classes_are_those_of_a_stable_sort(num_classes, k):
    """The best of many classes, with ties and zeros of both signs among them, are those of a stable sort."""
    values = np.random.default_rng(0).integers(0, 8, (50, num_classes)).astype(np.float32) / 8
    values[::2, ::3] = -0.0
    np.testing.assert_array_equal(np.argsort(-values, axis=1, kind="stable")[:, :k], top_k(values, k))


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_half_precision_is_widened(make_model_context, datatype, dtype):
    """Scores of a model in half precision give probabilities in FP32."""
    scores = np.array([[1, 2, 3, 4, 5]], dtype)
    model = make_model_context({"SCORES": (datatype, (5,))}, {"PROBS": ("FP32", (5,))})
    (outcome,) = execute_batch(load_backend(BACKENDS["softmax"], model), make_served_request(SCORES=scores))
    expected = scipy.special.softmax(scores.astype(np.float64), axis=1)
    np.testing.assert_allclose(outcome.outputs["PROBS"], expected, rtol=1e-5)
