"""Anthropic's interface to a chat: ``/v1/messages``, and the tokens of one."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.errors import WeftError
from weft.gateway.anthropic.request import COUNT_FIELDS, FIELDS, parse, parse_count
from weft.gateway.errors import anthropic_body
from weft.gateway.openai.answer import CONTENT, REASONING, TOOL_CALLS
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.generate import TokenLogprobs
from weft.gateway.openai.messages import INVALID_JSON
from weft.gateway.openai.parts import Part, PartWriter, part_response
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.tokenize import TokenizeRequest, TokenModel, ask_ids
from weft.gateway.openai.writing import Event

#: Type of a delta, and its field, by kinds of parts.
_DELTAS = {
    CONTENT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    TOOL_CALLS: ("input_json_delta", "partial_json"),
}


class MessageWriter(PartWriter):
    """Each part is a block."""

    id_prefix: ClassVar[str] = "msg_"
    id_header: ClassVar[str] = "request-id"

    @override
    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([], None, num_output_tokens=0)}
        yield {"type": "ping"}

    @override
    def begin_part(self, part: Part) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    @override
    def add(self, part: Part, text: str, logprobs: Sequence[TokenLogprobs]) -> Iterator[Event]:
        kind, name = _DELTAS[part.kind]
        yield {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, name: text}}

    @override
    def end_part(self, part: Part) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": part.index}

    @override
    def end_answer(self) -> Iterator[Event]:
        ending = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop_reason}
        yield {"type": "message_delta", "delta": ending, "usage": self._usage(self.usage.num_output_tokens)}
        yield {"type": "message_stop"}

    @override
    def answer(self) -> dict[str, Any]:
        blocks = [_block(part) for part in self.parts]
        return self._message(blocks, self._stop_reason(), self.usage.num_output_tokens)

    @override
    def error_body(self, error: WeftError) -> dict[str, Any]:
        return anthropic_body(error)

    def _message(self, blocks: list[dict[str, Any]], stop_reason: str | None, num_output_tokens: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": self.stop_reason if stop_reason else None,
            "usage": self._usage(num_output_tokens),
        }

    def _stop_reason(self) -> str:
        if self.finish_reason == "length":
            return "max_tokens"
        if self.stop_reason is not None:
            return "stop_sequence"
        return "tool_use" if any(part.kind == TOOL_CALLS for part in self.parts) else "end_turn"

    def _usage(self, num_output_tokens: int) -> dict[str, Any]:
        """Tokens from the cache are not among the input's; counts that a model does not report are 0."""
        num_cached = sum(self.usage.num_cached_tokens.values())
        return {
            "input_tokens": sum(self.usage.num_input_tokens.values()) - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == CONTENT:
        return {"type": "text", "text": part.text}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> dict[str, Any]:
    """The object that a model wrote as arguments; if it is none, the text as a field of one."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


async def _count(request: TokenizeRequest, model: TokenModel, call: EndpointCall) -> ASGIApp:
    return JSONResponse({"input_tokens": len(await ask_ids(request, model, call))})


#: What is served besides OpenAI's.
ENDPOINTS = (
    Endpoint(
        "/v1/messages",
        TextModel,
        parse,
        partial(part_response, writer=MessageWriter),
        FIELDS,
        anthropic_body,
        operation="chat",
    ),
    Endpoint("/v1/messages/count_tokens", TokenModel, parse_count, _count, COUNT_FIELDS, anthropic_body),
)
