"""Transforms against scipy, transformers and plain loops: softmax, sigmoid, nearest, distribution, detokenize."""

import json

import ml_dtypes
import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from safetensors.numpy import save_file
from tests.unit.backends.files import byte_level
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.backends.postprocess.classifier import top_k as best_of

LABELS = ["news", "sport", "größe", "art", "last"]
DATATYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16", "int64": "INT64"}


@pytest.fixture
def run(version_folder, make_model_context):
    """``run(transform, outputs, parameters, **inputs)``: the outputs of one request."""
    (version_folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")

    def run(transform, outputs, parameters, **inputs):
        declared = {name: (DATATYPES[str(array.dtype)], array.shape[1:]) for name, array in inputs.items()}
        model = make_model_context(declared, outputs, **parameters)
        (outcome,) = execute_batch(load_backend(BACKENDS[transform], model), make_served_request(**inputs))
        return outcome.outputs

    return run


@pytest.mark.parametrize("temperature", ["1", "0.5", "3"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_softmax_is_that_of_scipy(run, top_k, temperature):
    """PROBS, TOP_PROBS, INDEX and LABEL agree with scipy's softmax and a sort."""
    scores = (np.random.default_rng(0).normal(size=(7, 5)) * 20).astype(np.float32)
    expected = scipy.special.softmax(scores.astype(np.float64) / float(temperature), axis=1)
    order = np.argsort(-expected, axis=1)[:, :top_k]
    declared = {"PROBS": ("FP32", (5,)), "TOP_PROBS": ("FP32", (top_k,))}
    declared |= {"INDEX": ("INT64", (top_k,)), "LABEL": ("BYTES", (top_k,))}
    outputs = run("softmax", declared, {"top_k": str(top_k), "temperature": temperature}, SCORES=scores)
    np.testing.assert_allclose(outputs["PROBS"], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(outputs["TOP_PROBS"], np.take_along_axis(expected, order, 1), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(outputs["INDEX"], order)
    assert [[LABELS[i].encode() for i in row] for row in order] == outputs["LABEL"].tolist()
    assert ["float32", "float32", "int64", "object"] == [str(array.dtype) for array in outputs.values()]


def test_entropy_is_that_of_scipy(run):
    """ENTROPY is scipy's entropy of the probabilities in nats, also where some are 0."""
    scores = (np.random.default_rng(0).normal(size=(9, 5)) * 3).astype(np.float32)
    scores[0], scores[1] = 0, [0, -np.inf, -np.inf, -np.inf, -np.inf]
    outputs = run("softmax", {"PROBS": ("FP32", (5,)), "ENTROPY": ("FP32", (1,))}, {}, SCORES=scores)
    expected = scipy.stats.entropy(scipy.special.softmax(scores.astype(np.float64), axis=1), axis=1)
    np.testing.assert_allclose(outputs["ENTROPY"][:, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_classes", [5, 64, 1000])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_best_classes_are_those_of_a_stable_sort(num_classes, k):
    """The best of many classes, with ties and zeros of both signs among them, are those of a stable sort."""
    values = np.random.default_rng(0).integers(0, 8, (50, num_classes)).astype(np.float32) / 8
    values[::2, ::3] = -0.0
    np.testing.assert_array_equal(np.argsort(-values, axis=1, kind="stable")[:, :k], best_of(values, k))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(run, dtype):
    """Scores of a model in half precision give probabilities in FP32."""
    scores = np.array([[1, 2, 3, 4, 5]], dtype)
    outputs = run("softmax", {"PROBS": ("FP32", (5,))}, {}, SCORES=scores)
    np.testing.assert_allclose(outputs["PROBS"], scipy.special.softmax(scores.astype(np.float64), axis=1), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sigmoid_is_that_of_scipy(run, temperature):
    """PROBS equal scipy's expit, also far from 0 and at infinity."""
    scores = (np.random.default_rng(0).normal(size=(9, 5)) * 30).astype(np.float32)
    scores[0] = [np.inf, -np.inf, 3e38, -3e38, 0]
    outputs = run("sigmoid", {"PROBS": ("FP32", (5,))}, {"temperature": str(temperature)}, SCORES=scores)
    expected = scipy.special.expit(scores.astype(np.float64) / temperature)
    np.testing.assert_allclose(outputs["PROBS"], expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("threshold", ["0.5", "0.9", "0.1,0.2,0.99,0.5,0.7"])
def test_listed_classes_are_those_of_a_loop(run, threshold):
    """Each row lists the classes that reach their threshold, best first, and then nothing."""
    scores = (np.random.default_rng(1).normal(size=(25, 5)) * 2).astype(np.float32)
    declared = dict.fromkeys(("PROBS", "TOP_PROBS"), ("FP32", (5,)))
    declared |= {"INDEX": ("INT64", (5,)), "LABEL": ("BYTES", (5,)), "COUNT": ("INT64", (1,))}
    outputs = run("sigmoid", declared, {"threshold": threshold}, SCORES=scores)
    limits = [float(number) for number in threshold.split(",")] * (1 if "," in threshold else 5)
    for row, probabilities in enumerate(outputs["PROBS"]):
        reached = [c for c in range(5) if probabilities[c] >= np.float32(limits[c])]
        listed = sorted(reached, key=lambda c: -probabilities[c])
        rest = 5 - len(listed)
        assert [len(listed)] == outputs["COUNT"][row].tolist()
        assert listed + [-1] * rest == outputs["INDEX"][row].tolist()
        assert [LABELS[c].encode() for c in listed] + [b""] * rest == outputs["LABEL"][row].tolist()
        assert [probabilities[c] for c in listed] + [0] * rest == outputs["TOP_PROBS"][row].tolist()


def test_the_nearest_entry_is_that_of_the_highest_cosine(run, version_folder):
    """Entry and score of each row equal those of a loop over the table."""
    table = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    save_file({"embeddings": table}, version_folder / "table.safetensors")
    (version_folder / "entries.json").write_text(json.dumps(LABELS))
    queries = np.random.default_rng(1).normal(size=(13, 4)).astype(np.float32) * 50
    outputs = run("nearest", {"ANSWER": ("BYTES", (1,)), "SCORE": ("FP32", (1,))}, {}, EMBEDDING=queries)
    for query, answer, score in zip(queries, outputs["ANSWER"], outputs["SCORE"], strict=True):
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in table]
        assert LABELS[cosines.index(max(cosines))].encode() == answer[0]
        np.testing.assert_allclose(score, [max(cosines)], rtol=1e-5)
    assert np.float32 == outputs["SCORE"].dtype


LEVELS = (0.001, 0.05, 0.5, 0.9, 0.999)
INPUTS = {
    "gaussian": ("MEAN", "VARIANCE"),
    "laplace": ("LOCATION", "SCALE"),
    "student_t": ("LOCATION", "SCALE", "DF"),
    "poisson": ("RATE",),
}
RANGES = {"DF": (0.3, 40), "SCALE": (0.01, 30), "VARIANCE": (0.01, 30), "RATE": (0, 200)}


@pytest.fixture
def distributed(run):
    """``distributed(family, arrays, link="identity")``: the outputs for two targets."""

    def distributed(family, arrays, link="identity"):
        declared = {"MEAN": ("FP32", (2,)), "VARIANCE": ("FP32", (2,)), "QUANTILES": ("FP32", (2, len(LEVELS)))}
        declared |= {} if family == "poisson" else {"ENTROPY": ("FP32", (2,))}
        parameters = {"family": family, "link": link, "levels": ",".join(map(str, LEVELS))}
        return run("distribution", declared, parameters, **dict(zip(INPUTS[family], arrays, strict=True)))

    return distributed


def _scipy(family, *values):
    """The frozen distributions of scipy for arrays in the order of the inputs."""
    if family == "gaussian":
        return scipy.stats.norm(values[0], np.sqrt(values[1]))
    if family == "laplace":
        return scipy.stats.laplace(values[0], values[1])
    if family == "student_t":
        return scipy.stats.t(values[2], values[0], values[1])
    return scipy.stats.poisson(values[0])


def _values(family, num_rows):
    random = np.random.default_rng(0)
    size = (num_rows, 2)
    return [
        random.uniform(*RANGES[name], size) if name in RANGES else random.normal(size=size) * 20
        for name in INPUTS[family]
    ]


@pytest.mark.parametrize("family", list(INPUTS))
def test_distributions_are_those_of_scipy(distributed, family):
    """Mean, variance, quantiles and entropy of many distributions equal scipy's, where they exist and where not."""
    values = _values(family, 40)
    if family == "student_t":
        values[2][:4] = [[0.5, 1.0], [1.5, 2.0], [2.5, 30], [1e6, 3]]
    if family == "poisson":
        values[0][:2] = [[0.0, 1e-9], [1.0, 5000.0]]
    outputs, oracle = distributed(family, values), _scipy(family, *values)
    assert {np.dtype(np.float32)} == {array.dtype for array in outputs.values()}
    mean = np.where(values[2] > 1, oracle.mean(), np.nan) if family == "student_t" else oracle.mean()
    np.testing.assert_allclose(outputs["MEAN"], mean, rtol=1e-6)
    np.testing.assert_allclose(outputs["VARIANCE"], oracle.var(), rtol=1e-5)
    for column, level in enumerate(LEVELS):
        np.testing.assert_allclose(outputs["QUANTILES"][:, :, column], oracle.ppf(level), rtol=1e-5, atol=1e-5)
    if family != "poisson":
        np.testing.assert_allclose(outputs["ENTROPY"], oracle.entropy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("link", ["exp", "softplus"])
@pytest.mark.parametrize("family", list(INPUTS))
def test_positive_parameters_may_come_as_the_network_gives_them(distributed, family, link):
    """With a link the outputs are those of the numbers that it stands for."""
    named = list(zip(INPUTS[family], _values(family, 5), strict=True))
    values = [np.abs(array) + 0.5 if name in RANGES else array for name, array in named]
    inverse = {"exp": np.log, "softplus": lambda x: np.log(np.expm1(np.minimum(x, 30))) + np.maximum(x - 30, 0)}[link]
    raw = [inverse(array) if name in RANGES else array for (name, _), array in zip(named, values, strict=True)]  # type: ignore[operator]
    plain, linked = distributed(family, values), distributed(family, raw, link)
    for name, array in plain.items():
        np.testing.assert_allclose(array, linked[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("padding", [0, -1])
def test_texts_of_ids_are_those_of_transformers(run, version_folder, skips, padding):
    """Rows padded with the end token or with -1 give the texts that transformers gives."""
    from transformers import PreTrainedTokenizerFast  # takes a second

    texts = ["Hello world, it's größe 東京 🙂", "", "the quick brown fox. User: more"]
    byte_level().save(str(version_folder / "tokenizer.json"))
    rows = [byte_level().encode(text).ids for text in texts]
    length = max(map(len, rows)) + 1
    ids = np.array([row + [padding] * (length - len(row)) for row in rows])
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    expected = [oracle.decode(row[row >= 0].tolist(), skip_special_tokens=skips) for row in ids]
    outputs = run("detokenize", {"TEXT": ("BYTES", (1,))}, {"skip_special_tokens": str(skips)}, output_ids=ids)
    assert [[text.encode()] for text in expected] == outputs["TEXT"].tolist()
    assert skips == (texts == expected) or padding == -1
