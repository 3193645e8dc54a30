"""Log probabilities in the two forms that OpenAI has for them."""

from collections.abc import Sequence
from typing import Any

from weft_gateway.openai.pieces import AnswerLogprobs, StreamedToken


def completion_logprobs(tokens: Sequence[AnswerLogprobs] | None, text_offset: int) -> dict[str, Any] | None:
    """Of ``/v1/completions``; None: none were asked for.

    Of tokens that have the same text the most probable one is shown, because the best are keyed by text.

    Args:
        tokens: In order.
        text_offset: Where the text of the first begins in the choice, in characters.
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


def chat_logprobs(tokens: Sequence[AnswerLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    """Of ``/v1/chat/completions``, with at most ``num_top`` of the best at each token; None: none were asked for."""
    if tokens is None:
        return None
    content = [
        _chat_token(sampled) | {"top_logprobs": [_chat_token(one) for one in top[:num_top]]} for sampled, top in tokens
    ]
    return {"content": content, "refusal": None}


def _by_text(sampled: StreamedToken, top: Sequence[StreamedToken]) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (*top, sampled):
        best.setdefault(token.text, token.logprob)
    return best


def _chat_token(token: StreamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.utf8}
