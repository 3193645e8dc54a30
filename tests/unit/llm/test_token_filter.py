"""A filter of tokens keeps no more of the output than its longest word needs."""

import pytest

from weft.llm.token_filter import TokenFilter


@pytest.mark.parametrize(("words", "most"), [((), 1), (((3,),), 1), (((3,), (4, 5, 6)), 3)])
def test_a_long_output_is_not_kept(words: tuple[tuple[int, ...], ...], most: int) -> None:
    """Its time per token does not grow with the output, also where no word is bad."""
    tokens = TokenFilter((1, 2), words, None)
    for token in range(100):
        tokens.append(token)
    assert len(tokens._output) <= most
