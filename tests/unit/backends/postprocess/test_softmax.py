"""The ``softmax`` transform against scipy."""

import ml_dtypes
import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.backends.postprocess.classifier import top_k
from weft.base.errors import InvalidArgumentError, NotFoundError

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


def test_large_scores_do_not_overflow(softmax):
    """Scores near the largest float give finite probabilities, and -inf gives 0."""
    scores = np.array([[3e38, 3e38, -3e38, 0, -np.inf]], np.float32)
    (outcome,) = execute_batch(softmax(), make_served_request(SCORES=scores))
    assert [[0.5, 0.5, 0.0, 0.0, 0.0]] == outcome.outputs["PROBS"].tolist()


def test_lower_index_wins_a_tie(softmax):
    """Equal scores are listed in the order of their classes."""
    (outcome,) = execute_batch(softmax(top_k="3"), make_served_request(SCORES=np.zeros((1, 5), np.float32)))
    assert [[0, 1, 2]] == outcome.outputs["INDEX"].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_fail_their_request(softmax, bad):
    """NaN or infinity in one row is INVALID_ARGUMENT for that request alone."""
    scores = np.ones((2, 5), np.float32)
    broken = scores.copy()
    broken[1, 3] = bad
    good, failed = execute_batch(softmax(), make_served_request(SCORES=scores), make_served_request(SCORES=broken))
    np.testing.assert_allclose(good.outputs["PROBS"], 0.2)
    assert isinstance(failed, InvalidArgumentError)
    assert f"input 'SCORES' row 1: the largest score is {bad}; it must be finite" == failed.message


def test_classes_under_the_threshold_are_not_listed(softmax):
    """Each row lists what reaches the threshold, counts it, and fills up with class -1 and empty labels."""
    scores = np.log(np.array([[0.5, 0.1, 0.3, 0.06, 0.04], [0.2, 0.2, 0.2, 0.2, 0.2]], np.float32))
    outputs = _outputs(3) | {"COUNT": ("INT64", (1,))}
    (outcome,) = execute_batch(
        softmax(outputs, top_k="3", threshold="0.25"), make_served_request(SCORES=np.ascontiguousarray(scores))
    )
    assert [[2], [0]] == outcome.outputs["COUNT"].tolist()
    assert [[0, 2, -1], [-1, -1, -1]] == outcome.outputs["INDEX"].tolist()
    assert [[b"cat", b"bird", b""], [b"", b"", b""]] == outcome.outputs["LABEL"].tolist()
    np.testing.assert_allclose(outcome.outputs["TOP_PROBS"], [[0.5, 0.3, 0], [0, 0, 0]], rtol=1e-5)  # type: ignore[arg-type]


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


def test_model_without_batch_dimension_gives_one_row(softmax):
    """With max_batch_size 0 input and outputs have no batch dimension."""
    backend = softmax({"LABEL": ("BYTES", (1,)), "PROBS": ("FP32", (5,))}, max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(SCORES=np.array([0, 0, 9, 0, 0], np.float32)))
    assert [b"bird"] == outcome.outputs["LABEL"].tolist()
    assert (5,) == outcome.outputs["PROBS"].shape


def test_only_declared_outputs_are_given(make_model_context):
    """Without LABEL among the outputs no labels file is needed."""
    model = make_model_context(INPUT, {"INDEX": ("INT64", (1,))})
    (outcome,) = execute_batch(
        load_backend(BACKENDS["softmax"], model), make_served_request(SCORES=np.eye(5, dtype=np.float32))
    )
    assert {"INDEX": [[0], [1], [2], [3], [4]]} == {name: array.tolist() for name, array in outcome.outputs.items()}


def test_label_filename_of_the_output_is_used(softmax, labels_file):
    """``label_filename`` of the output LABEL names the file; one in the model's folder comes first."""
    (labels_file.parent / "names.txt").write_bytes(b"v\r\nw\r\nx\r\ny\r\nz\r\n")
    (labels_file.parent / "1" / "names.txt").write_text("a\nb\nc\nd\ne")
    declared = [{"name": "LABEL", "data_type": "TYPE_STRING", "dims": ["1"], "label_filename": "names.txt"}]
    backend = softmax({"LABEL": ("BYTES", (1,))}, config={"output": declared})
    (outcome,) = execute_batch(backend, make_served_request(SCORES=np.eye(5, dtype=np.float32)[:2]))
    assert [[b"v"], [b"w"]] == outcome.outputs["LABEL"].tolist()


@pytest.mark.parametrize(
    ("outputs", "parameters", "message"),
    [
        ({"LABELS": ("BYTES", (1,))}, {}, "unknown output 'LABELS'; use some of PROBS, TOP_PROBS, INDEX, LABEL"),
        ({"LABEL": ("BYTES", (2,))}, {"top_k": "3"}, "'LABEL' must be BYTES [3], got BYTES [2]"),
        ({"INDEX": ("INT32", (1,))}, {}, "'INDEX' must be INT64 [1], got INT32 [1]"),
        ({"INDEX": ("INT64", (6,))}, {"top_k": "6"}, "'top_k' must be a whole number from 1 to 5, got '6'"),
        ({"PROBS": ("FP32", (5,))}, {"temperature": "0"}, "'temperature' must be above 0, got '0.0'"),
        ({"PROBS": ("FP32", (5,))}, {"threshold": "1.5"}, "'threshold' must be from 0 to 1, got '1.5'"),
        ({"PROBS": ("FP32", (5,))}, {"threshold": "0,1"}, "'threshold' must be 1 or 5 numbers, got '0,1'"),
        ({"PROBS": ("FP32", (5,))}, {"temprature": "1"}, "unknown parameter 'temprature'; did you mean 'temperature'?"),
        ({"LABEL": ("BYTES", (1,))}, {"labels": "../../secret"}, "give a name inside that folder"),
    ],
)
def test_wrong_configuration_is_a_load_error(softmax, outputs, parameters, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        softmax(outputs, **parameters)
    assert message in error.value.message


def test_labels_must_be_as_many_as_classes(softmax, labels_file):
    """A file of four labels for five classes is refused with both numbers."""
    labels_file.write_text("a\nb\nc\nd\n")
    with pytest.raises(InvalidArgumentError, match=r"labels.txt has 4 labels, but 'SCORES' has 5 classes"):
        softmax()


def test_missing_labels_are_a_load_error(softmax, labels_file):
    """Without the file the error names it and the folder."""
    labels_file.unlink()
    with pytest.raises(NotFoundError, match=r"has no file 'labels.txt'"):
        softmax()
