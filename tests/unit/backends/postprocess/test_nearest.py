"""The ``nearest`` transform against a plain loop."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS

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
