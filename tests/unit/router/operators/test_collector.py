"""Pieces of a stream, and sentences of a text."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router import make

from weft.base.errors import InternalError
from weft.base.tensors import WireTensor, bytes_tensor, decode, encode
from weft.router.operators.collector.pieces import CollectorSettings, Pieces, SentenceBuffer

TEXTS = st.text(st.sampled_from('ab .!?\n")\u2019。ä'), max_size=60)


def sentences(text: bytes, cuts: list[int], max_bytes: int) -> list[bytes]:
    """Those of a text that comes in parts."""
    buffer, found, bounds = SentenceBuffer(max_bytes), [], [0, *sorted(cuts), len(text)]
    for start, stop in pairwise(bounds):
        buffer.add(text[start:stop])
        while len(buffer) and (sentence := buffer.take()) is not None:
            found.append(sentence)
    return [*found, buffer.take_all()]


@given(TEXTS, st.lists(st.integers(0, 60)), st.integers(4, 40))
def test_sentences_are_the_text_however_it_came(text: str, cuts: list[int], max_bytes: int) -> None:
    """They end at the same places, are none of them longer than allowed, lose nothing and cut no character."""
    data = text.encode()
    found = sentences(data, [min(cut, len(data)) for cut in cuts], max_bytes)
    assert found == sentences(data, [], max_bytes)
    assert data == b"".join(found)
    assert all(len(one) <= max_bytes and one.decode() is not None for one in found)
    assert all(one.strip() for one in found[:-1] if len(one) + 3 < max_bytes)


def collected(settings: CollectorSettings, *responses: WireTensor) -> list[WireTensor | None]:
    """What becomes of the only tensor of some responses."""
    pieces = Pieces(settings)
    found = [frame[0] for one in responses for frame in pieces.add([one])]
    rest = pieces.rest()
    return found if rest is None else [*found, rest[0]]


def test_rows_of_numbers_are_joined_within_each_row() -> None:
    """The batch dimension stays."""
    parts = [encode(np.arange(4, dtype=np.int32).reshape(2, 2) + 10 * i) for i in range(2)]
    (whole,) = collected(CollectorSettings(((0, 1),)), *parts)
    assert whole is not None
    assert decode(whole).tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_strings_are_joined_element_by_element() -> None:
    """Of any bytes: what a model cuts within a character is whole again."""
    parts = [bytes_tensor([b"a", "ä".encode()[:1]], (2, 1)), bytes_tensor([b"b", "ä".encode()[1:]], (2, 1))]
    (whole,) = collected(CollectorSettings(((0, 1),)), *parts)
    assert whole is not None
    assert decode(whole).tolist() == [[b"ab"], ["ä".encode()]]


@pytest.mark.parametrize(
    ("settings", "responses", "message"),
    [
        (CollectorSettings(((0, 1),), text=0), [make.text("a", "b")], r"2 texts, of shape \[2\].*send one row"),
        (CollectorSettings(((0, 1),)), [make.text("a"), make.text("a", "b")], r"BYTES\[1\] and BYTES\[2\]"),
        (
            CollectorSettings(((0, 1),)),
            [make.tensor(1, 2, shape=(1, 2)), make.tensor(1, 2, shape=(2, 1))],
            "do not make",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    settings: CollectorSettings, responses: list[WireTensor], message: str
) -> None:
    """With both shapes, or the cure."""
    with pytest.raises(InternalError, match=message):
        collected(settings, *responses)
