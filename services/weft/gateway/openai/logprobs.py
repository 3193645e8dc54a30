"""Log probabilities in OpenAI's two formats."""

from collections.abc import Sequence
from typing import Any

from weft.gateway.openai.deltas import PositionLogprobs, ScoredToken


def completion_logprobs(tokens: Sequence[PositionLogprobs] | None, text_offset: int) -> dict[str, Any] | None:
    """Format of ``/v1/completions``; None: not requested.

    ``top_logprobs`` is keyed by text, so among tokens with the same text only the most likely one is reported.

    Args:
        tokens: In order.
        text_offset: Offset of the first token's text in the choice, in characters.
    """
    if tokens is None:
        return None
    offsets: list[int] = []
    for sampled, _ in tokens:
        offsets.append(text_offset)
        text_offset += len(sampled.text)
    return {
        "tokens": [sampled.text for sampled, _ in tokens],
        "token_logprobs": [sampled.logprob for sampled, _ in tokens],
        "top_logprobs": [_by_text(sampled, top) for sampled, top in tokens],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[PositionLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    """Format of ``/v1/chat/completions``, with at most ``num_top`` alternatives per token; None: not requested."""
    if tokens is None:
        return None
    content = [
        _chat_token(sampled) | {"top_logprobs": [_chat_token(one) for one in top[:num_top]]} for sampled, top in tokens
    ]
    return {"content": content, "refusal": None}


def _by_text(sampled: ScoredToken, top: Sequence[ScoredToken]) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (*top, sampled):
        best.setdefault(token.text, token.logprob)
    return best


def _chat_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.utf8}
