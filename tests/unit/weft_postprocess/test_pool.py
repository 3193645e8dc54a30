"""The ``pool`` transform against a plain loop in torch."""

import numpy as np
import pytest
import torch

from weft_common.errors import InvalidArgumentError
from weft_postprocess.transforms import BACKENDS

INPUTS = {"last_hidden_state": ("FP32", (-1, 7)), "attention_mask": ("INT64", (-1,))}
OUTPUT = {"EMBEDDING": ("FP32", (7,))}


def _reference(hidden, mask, *, normalize=True):
    rows = []
    for states, keeps in zip(torch.tensor(hidden), torch.tensor(mask), strict=True):
        total, count = torch.zeros(states.shape[1]), 0
        for state, keep in zip(states, keeps, strict=True):
            if keep:
                total, count = total + state, count + 1
        rows.append(total / max(count, 1))
    pooled = torch.stack(rows)
    return (torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled).numpy()


def _case(num_rows, length, seed=0):
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(num_rows, length, 7)).astype(np.float32)
    mask = (random.random((num_rows, length)) < 0.6).astype(np.int64)
    mask[:, 0] = 1
    return hidden, mask


@pytest.fixture
def pool(make_model_context, load_backend):
    """A loaded transform with defaults."""
    return load_backend(BACKENDS["pool"], make_model_context(INPUTS, OUTPUT))


@pytest.mark.parametrize(("num_rows", "length"), [(1, 1), (3, 5), (8, 63), (5, 257)])
def test_embedding_equals_the_loop(pool, make_served_request, execute_batch, num_rows, length):
    """Mean over kept tokens, then length 1, at odd sizes."""
    hidden, mask = _case(num_rows, length)
    (outcome,) = execute_batch(pool, make_served_request(last_hidden_state=hidden, attention_mask=mask))
    assert np.float32 == outcome.outputs["EMBEDDING"].dtype
    np.testing.assert_allclose(outcome.outputs["EMBEDDING"], _reference(hidden, mask), rtol=1e-4, atol=1e-6)


def test_requests_of_a_batch_get_their_own_rows(pool, make_served_request, execute_batch):
    """Rows of two requests are pooled together and handed back apart."""
    cases = [_case(2, 5, seed=1), _case(3, 5, seed=2)]
    outcomes = execute_batch(pool, *(make_served_request(last_hidden_state=h, attention_mask=m) for h, m in cases))
    for outcome, (hidden, mask) in zip(outcomes, cases, strict=True):
        np.testing.assert_allclose(outcome.outputs["EMBEDDING"], _reference(hidden, mask), rtol=1e-4, atol=1e-6)


def test_masked_tokens_do_not_matter(pool, make_served_request, execute_batch):
    """Whatever stands under a mask of 0 leaves the embedding as it is."""
    hidden, mask = _case(2, 9)
    changed = np.where(mask[:, :, None] == 1, hidden, np.float32(1e6))
    first, second = execute_batch(
        pool,
        make_served_request(last_hidden_state=hidden, attention_mask=mask),
        make_served_request(last_hidden_state=changed, attention_mask=mask),
    )
    np.testing.assert_allclose(first.outputs["EMBEDDING"], second.outputs["EMBEDDING"], rtol=1e-5)


def test_row_without_tokens_is_zero(pool, make_served_request, execute_batch):
    """A mask of zeros gives the zero vector, not NaN."""
    hidden, mask = _case(1, 3)
    (outcome,) = execute_batch(pool, make_served_request(last_hidden_state=hidden, attention_mask=mask * 0))
    assert [[0.0] * 7] == outcome.outputs["EMBEDDING"].tolist()


def test_normalisation_can_be_turned_off(make_model_context, load_backend, make_served_request, execute_batch):
    """With normalize false the mean itself is the answer."""
    backend = load_backend(BACKENDS["pool"], make_model_context(INPUTS, OUTPUT, normalize="false"))
    hidden, mask = _case(3, 5)
    (outcome,) = execute_batch(backend, make_served_request(last_hidden_state=hidden, attention_mask=mask))
    expected = _reference(hidden, mask, normalize=False)
    np.testing.assert_allclose(outcome.outputs["EMBEDDING"], expected, rtol=1e-4, atol=1e-6)


def test_different_lengths_fail_the_request(pool, make_served_request, execute_batch):
    """Hidden states and a mask of different length are INVALID_ARGUMENT with both shapes."""
    hidden, mask = _case(2, 5)
    (outcome,) = execute_batch(pool, make_served_request(last_hidden_state=hidden, attention_mask=mask[:, :4]))
    assert isinstance(outcome, InvalidArgumentError)
    assert "'last_hidden_state' has shape [2, 5, 7] and 'attention_mask' [2, 4]" in outcome.message


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "message"),
    [
        ({"h": ("FP32", (-1, 7))}, OUTPUT, {}, "must have two inputs (hidden states and mask) and one output, got 1"),
        ({**INPUTS, "attention_mask": ("FP32", (-1,))}, OUTPUT, {}, "must be INT64 or INT32 or BOOL [any]"),
        (INPUTS, {"EMBEDDING": ("FP32", (8,))}, {}, "'EMBEDDING' must be FP32 [7], got FP32 [8]"),
        (INPUTS, OUTPUT, {"max_batch_size": 0}, "needs max_batch_size of at least 1, got 0"),
        (INPUTS, OUTPUT, {"normalise": "true"}, "unknown parameter 'normalise'; did you mean 'normalize'?"),
    ],
)
def test_wrong_configuration_is_a_load_error(make_model_context, load_backend, inputs, outputs, options, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        load_backend(BACKENDS["pool"], make_model_context(inputs, outputs, **options))
    assert message in error.value.message
