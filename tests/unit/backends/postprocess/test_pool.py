"""The ``pool`` transform against a plain loop in torch."""

import asyncio

import numpy as np
import pytest
import torch
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import NUMPY_BY_DATATYPE, decode, encode
from weft.serving.core import ServingCore

INPUTS = {"last_hidden_state": ("FP32", (-1, 7)), "attention_mask": ("INT64", (-1,))}
OUTPUT = {"EMBEDDING": ("FP32", (7,))}


def _reference(hidden, mask):
    rows = []
    for states, keeps in zip(torch.tensor(hidden), torch.tensor(mask), strict=True):
        total, count = torch.zeros(states.shape[1]), 0
        for state, keep in zip(states, keeps, strict=True):
            if keep:
                total, count = total + state, count + 1
        rows.append(total / max(count, 1))
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def _case(num_rows, length, seed=0):
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(num_rows, length, 7)).astype(np.float32)
    mask = (random.random((num_rows, length)) < 0.6).astype(np.int64)
    mask[:, :1] = 1
    return hidden, mask


@pytest.fixture
def pool(make_model_context):
    """A loaded transform with defaults."""
    return load_backend(BACKENDS["pool"], make_model_context(INPUTS, OUTPUT))


@pytest.mark.parametrize(("num_rows", "length"), [(1, 1), (3, 5), (8, 63), (5, 257)])
def test_embedding_equals_the_loop(pool, num_rows, length):
    """Mean over kept tokens, then length 1, at odd sizes."""
    hidden, mask = _case(num_rows, length)
    (outcome,) = execute_batch(pool, make_served_request(last_hidden_state=hidden, attention_mask=mask))
    assert np.float32 == outcome.outputs["EMBEDDING"].dtype
    np.testing.assert_allclose(outcome.outputs["EMBEDDING"], _reference(hidden, mask), rtol=1e-4, atol=1e-6)


def _sentence_transformers(hidden, mask, pooling):
    """As ``sentence_transformers.models.Pooling`` has it, for padding on the right."""
    hidden, mask = torch.tensor(hidden), torch.tensor(mask)
    expanded = mask.unsqueeze(-1).expand(hidden.size()).float()
    if pooling == "mean":
        pooled = (hidden * expanded).sum(1) / expanded.sum(1).clamp(min=1e-9)
    elif pooling == "cls":
        pooled = hidden[:, 0]
    elif pooling == "max":
        pooled = hidden.masked_fill(expanded == 0, -1e9).max(1)[0]
    else:
        last = mask.sum(1) - 1
        pooled = hidden[torch.arange(len(hidden)), last]
    return torch.nn.functional.normalize(pooled, p=2, dim=1).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last_token"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
def test_every_pooling_equals_sentence_transformers(make_model_context, pooling, side, datatype):
    """Each pooling gives what its reference gives, with the padding on either side and in every precision."""
    lengths = np.array([1, 4, 9, 6])
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    hidden = np.random.default_rng(3).normal(size=(4, 9, 7)).astype(NUMPY_BY_DATATYPE[datatype])
    expected = _sentence_transformers(hidden.astype(np.float32), mask, pooling)
    if side == "left":
        order = [np.argsort(row, kind="stable") for row in mask]
        hidden = np.stack([row[index] for row, index in zip(hidden, order, strict=True)])
        mask = np.sort(mask, axis=1)
    inputs = INPUTS | {"last_hidden_state": (datatype, (-1, 7))}
    backend = load_backend(BACKENDS["pool"], make_model_context(inputs, OUTPUT, pooling=pooling))
    (outcome,) = execute_batch(backend, make_served_request(last_hidden_state=hidden, attention_mask=mask))
    np.testing.assert_allclose(outcome.outputs["EMBEDDING"], expected, rtol=1e-5, atol=1e-6)


RAGGED = """
backend: "pool"
max_batch_size: 8
input [
  { name: "H" data_type: TYPE_FP32 dims: [ -1, 7 ] allow_ragged_batch: true },
  { name: "M" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
]
output [ { name: "E" data_type: TYPE_FP32 dims: [ 7 ] } ]
dynamic_batching { }
"""


async def test_texts_of_different_lengths_share_a_batch(tmp_path, monkeypatch):
    """With `allow_ragged_batch` four texts are one execution; one with a bad mask fails alone, at its own row."""
    (tmp_path / "pool" / "1").mkdir(parents=True)
    (tmp_path / "pool" / "config.pbtxt").write_text(RAGGED)
    monkeypatch.setenv("WEFT_DELAY_SCHEDULER", "4")
    core = ServingCore(tmp_path, BACKENDS)
    await core.start()
    cases = [_case(num_rows, length, seed=length) for num_rows, length in ((1, 3), (2, 9), (1, 0), (2, 4))]
    cases[3][1][1, 2] = 2
    calls = [InferCall("pool", inputs={"H": encode(hidden), "M": encode(mask)}) for hidden, mask in cases]
    answers = await asyncio.gather(*(core.infer(call, CallContext()) for call in calls), return_exceptions=True)
    (counted,) = core.statistics("pool", "1")
    await core.close(grace_s=5)
    assert "input 'M' row 1: 2 in a mask of 0 and 1" in answers.pop().message
    for (hidden, mask), answer in zip(cases[:3], answers, strict=True):
        np.testing.assert_allclose(decode(answer.outputs["E"]), _reference(hidden, mask), rtol=1e-4, atol=1e-6)
    assert 1 == counted.execution_count
