"""Bytes of plans and results: what is packed comes back equal, and other bytes are refused."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.llm.ranks.codec import pack, unpack
from weft.llm.request import StepLogprobs
from weft.llm.runner import StepTokens
from weft.llm.scheduler.plan import BlockTransfers, ForwardPlan, GrammarMasks

_DTYPES = {"new_params": np.float32, "penalty_bias": np.float32, "slot_mapping": np.int64, "new_seeds": np.int64}


def _array(draw: st.DrawFn, dtype: Any = np.int32, num_dims: int = 1) -> Any:
    shape = draw(st.tuples(*[st.integers(0, 5)] * num_dims))
    data = draw(st.binary(min_size=40, max_size=40))
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((data * 10)[:size], dtype).reshape(shape)


@st.composite
def _plans(draw: st.DrawFn) -> ForwardPlan:
    names = ForwardPlan._fields[:20]
    arrays = {
        name: _array(draw, _DTYPES.get(name, np.int32), 1 + (name in ("table_delta", "new_params"))) for name in names
    }
    masks = GrammarMasks(_array(draw), _array(draw, np.int32, 2))
    transfers = BlockTransfers(*(_array(draw, each, 2) for each in (np.int32, np.uint8, np.int32, np.uint8)))
    return ForwardPlan(
        **arrays,
        max_q_len=draw(st.integers(0, 2**20)),
        max_ctx_len=draw(st.integers(0, 2**31)),
        transfers=draw(st.sampled_from([None, transfers])),
        grammar=draw(st.sampled_from([None, masks])),
        num_score_logprobs=draw(st.integers(0, 20)),
    )


@st.composite
def _results(draw: st.DrawFn) -> StepTokens:
    logprobs = StepLogprobs(_array(draw, np.float32), _array(draw, np.int32, 2), _array(draw, np.float32, 2))
    return StepTokens(
        _array(draw),
        draw(st.sampled_from([None, logprobs])),
        draw(st.sampled_from([None, _array(draw)])),
        draw(st.sampled_from([(), [3, 1]])),
        draw(st.booleans()),
        frozenset(draw(st.sets(st.integers(0, 99), max_size=3))),
        draw(st.sampled_from([None, logprobs])),
    )


def _assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        assert right.flags.writeable
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            _assert_equal(*pair)
    else:
        assert left == right


@given(st.one_of(_plans(), _results()))
def test_what_is_packed_comes_back(value: Any) -> None:
    """Types, shapes, every bit of an array, and that arrays may be written."""
    _assert_equal(value, unpack(pack(value)))


@settings(max_examples=300)
@given(_results(), st.data())
def test_other_bytes_are_refused(value: Any, data: st.DataObject) -> None:
    """Cut off, with more behind, or with a byte changed, bytes give ValueError or a value, and no other exception."""
    packed = pack(value)
    for wrong in (packed[: data.draw(st.integers(0, len(packed) - 1))], packed + b"12345678"):
        with pytest.raises(ValueError, match=r"bytes|not a plan|ends at|Expecting|Unterminated|char"):
            unpack(wrong)
    place = data.draw(st.integers(0, len(packed) - 1))
    changed = packed[:place] + bytes([packed[place] ^ data.draw(st.integers(1, 255))]) + packed[place + 1 :]
    with contextlib.suppress(ValueError):
        unpack(changed)


def test_what_no_rank_knows_is_not_packed() -> None:
    """Objects and other types of numbers are no part of a plan."""
    for value in (np.zeros(2, np.float64), object(), "text", (np.zeros(2, np.int32),)):
        with pytest.raises(TypeError):
            pack(value)
