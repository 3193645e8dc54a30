"""The ``nearest`` transform against a plain loop."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError, NotFoundError

ENTRIES = ["Reset it here.", "", "Größe: 東京", "last"]
INPUT = {"EMBEDDING": ("FP32", (5,))}
OUTPUTS = {"ANSWER": ("BYTES", (1,)), "SCORE": ("FP32", (1,))}
TABLE = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


@pytest.fixture
def nearest(version_folder, make_model_context):
    """Makes a loaded transform from a table and entries."""

    def make(outputs=OUTPUTS, *, tensors=None, entries=ENTRIES, inputs=INPUT, **options):
        save_file(tensors or {"embeddings": TABLE}, version_folder / "table.safetensors")
        (version_folder / "entries.json").write_text(json.dumps(entries))
        return load_backend(BACKENDS["nearest"], make_model_context(inputs, outputs, **options))

    return make


def _reference(query, table):
    scores = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in table]
    return scores.index(max(scores)), max(scores)


def test_answer_is_the_entry_of_the_highest_cosine(nearest):
    """Entry and score of each row equal those of a loop over the table."""
    queries = np.random.default_rng(1).normal(size=(13, 5)).astype(np.float32) * 50
    expected = [_reference(query, TABLE) for query in queries]
    (outcome,) = execute_batch(nearest(), make_served_request(EMBEDDING=queries))
    assert [[ENTRIES[index].encode()] for index, _ in expected] == outcome.outputs["ANSWER"].tolist()
    np.testing.assert_allclose(outcome.outputs["SCORE"], [[score] for _, score in expected], rtol=1e-5)
    assert np.float32 == outcome.outputs["SCORE"].dtype


def test_score_may_be_the_only_output(nearest):
    """One of the two outputs may be left out."""
    (outcome,) = execute_batch(nearest({"s": ("FP32", (1,))}), make_served_request(EMBEDDING=TABLE[2:3] * 3))
    assert ["s"] == list(outcome.outputs)
    np.testing.assert_allclose(outcome.outputs["s"], [[1.0]], rtol=1e-6)


def test_zero_query_scores_zero(nearest):
    """A zero vector is as near to every entry: the first one with score 0."""
    (outcome,) = execute_batch(nearest(), make_served_request(EMBEDDING=np.zeros((1, 5), np.float32)))
    assert ([[ENTRIES[0].encode()]], [[0.0]]) == tuple(array.tolist() for array in outcome.outputs.values())


def test_first_of_equal_entries_wins(nearest):
    """A table with the same row twice answers with the earlier entry."""
    table = np.ascontiguousarray(TABLE[[3, 1, 1, 0]])
    (outcome,) = execute_batch(nearest(tensors={"embeddings": table}), make_served_request(EMBEDDING=TABLE[1:2]))
    assert [[ENTRIES[1].encode()]] == outcome.outputs["ANSWER"].tolist()


def test_query_that_is_not_finite_fails_alone(nearest):
    """NaN is INVALID_ARGUMENT for its own request."""
    bad = TABLE[:2].copy()
    bad[1, 1] = np.nan
    failed, good = execute_batch(
        nearest(), make_served_request(EMBEDDING=bad), make_served_request(EMBEDDING=TABLE[3:])
    )
    assert isinstance(failed, InvalidArgumentError)
    assert "input 'EMBEDDING' row 1: nan at [1]; numbers must be finite" == failed.message
    assert [[b"last"]] == good.outputs["ANSWER"].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entries": ENTRIES[:3]}, "entries.json has 3 entries, but the table has 4 rows"),
        ({"entries": [1, 2, 3, 4]}, "entries.json must be a list of strings"),
        ({"tensors": {"table": TABLE}}, "must hold a tensor 'embeddings' of finite float32 [N, D]"),
        ({"tensors": {"embeddings": TABLE.astype(np.float64)}}, "it holds embeddings float64 [4, 5]"),
        ({"inputs": {"EMBEDDING": ("FP32", (6,))}}, "'EMBEDDING' must be FP32 [5], got FP32 [6]"),
        ({"outputs": {"a": ("BYTES", (1,)), "b": ("BYTES", (1,))}}, "or both, got a BYTES, b BYTES"),
        ({"outputs": {"a": ("INT64", (1,))}}, "'a' must be BYTES or FP32 [1], got INT64 [1]"),
        ({"metric": "dot"}, "unknown parameter 'metric'"),
    ],
)
def test_wrong_configuration_is_a_load_error(nearest, options, message):
    """What configuration or files have wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        nearest(**options)
    assert message in error.value.message


def test_broken_table_is_a_load_error(version_folder, make_model_context):
    """A file that is no safetensors file is INVALID_ARGUMENT, a missing one NOT_FOUND."""
    model = make_model_context(INPUT, OUTPUTS)
    with pytest.raises(NotFoundError, match=r"has no file 'table.safetensors'; it has no files"):
        load_backend(BACKENDS["nearest"], model)
    (version_folder / "table.safetensors").write_bytes(b"not a table")
    with pytest.raises(InvalidArgumentError, match=r"is not a safetensors file"):
        load_backend(BACKENDS["nearest"], model)
