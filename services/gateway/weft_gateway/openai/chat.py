"""``/v1/chat/completions``: from a body to messages, from pieces to OpenAI's objects."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers

from weft_gateway.errors import RequestError
from weft_gateway.http.body import is_encodable
from weft_gateway.openai.ask import Ask, take_common
from weft_gateway.openai.fields import Fields
from weft_gateway.openai.generation import CollectedChoice, Usage
from weft_gateway.openai.logprobs import chat_logprobs
from weft_gateway.openai.messages import take_messages
from weft_gateway.openai.pieces import Piece
from weft_gateway.openai.sampling import MAX_INT32, take_sampling
from weft_gateway.openai.templates import ChatTemplate

MAX_TOP_LOGPROBS = 20
MAX_VARIABLES = 64

#: The template has written them already.
_NO_SPECIAL_TOKENS = {"add_special_tokens": False}
#: Fields of OpenAI that ask for more than text, with values that do not.
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "moderation": (),
    "prompt_cache_options": (),
}


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A checked body.

    Attributes:
        ask: What both endpoints have.
        messages: With ``role``, ``content`` and maybe ``name``.
        add_generation_prompt: Whether the prompt ends where the assistant's answer begins.
        variables: More for the template.
    """

    ask: Ask
    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]

    async def prompt(self, template: ChatTemplate) -> str:
        """The messages as one text, made on a thread. Raises as ``ChatTemplate.render``."""
        messages = self.messages
        if not template.knows_developer:
            messages = [_with_older_role(message) for message in messages]
        return await asyncio.to_thread(
            template.render,
            messages,
            add_generation_prompt=self.add_generation_prompt,
            variables=self.variables,
        )


def parse(body: Mapping[str, Any], headers: Headers) -> ChatAsk:
    """What a body asks for. Raises RequestError, or DeadlineExceededError for a time of 0."""
    fields = Fields(body)
    for name, harmless in _UNSUPPORTED.items():
        fields.refuse(name, harmless)
    sampling = take_sampling(fields)
    # Without a limit an answer may fill what the model has room for, to which models cut every number.
    sampling["max_tokens"] = _max_tokens(fields) or MAX_INT32
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        sampling["logprobs"] = top_logprobs or 0
    elif top_logprobs is not None:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    messages = take_messages(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt")
    variables = _variables(fields)
    ask = take_common(fields, sampling, headers)
    return ChatAsk(
        replace(ask, parameters={**ask.parameters, **_NO_SPECIAL_TOKENS}),
        messages,
        add_generation_prompt is not False,
        variables,
    )


def _max_tokens(fields: Fields) -> int | None:
    """``max_completion_tokens``, or its older name; both only if they are equal."""
    newer = fields.integer("max_completion_tokens", 1, MAX_INT32)
    older = fields.integer("max_tokens", 1, MAX_INT32)
    if newer is not None and older not in (None, newer):
        raise RequestError(
            f"'max_tokens' is {older} and 'max_completion_tokens' is {newer}; give one", param="max_tokens"
        )
    return newer if newer is not None else older


def _variables(fields: Fields) -> Mapping[str, Any]:
    variables: dict[str, Any] | None = fields.raw("chat_template_kwargs")
    if fields.object("chat_template_kwargs") is None or variables is None:
        return {}
    if len(variables) > MAX_VARIABLES:
        raise RequestError(
            f"'chat_template_kwargs' has {len(variables)} variables; at most {MAX_VARIABLES} are taken",
            param="chat_template_kwargs",
        )
    if not is_encodable(json.dumps(variables, ensure_ascii=False)):
        raise RequestError(
            "'chat_template_kwargs' has half of a surrogate pair; send whole characters", param="chat_template_kwargs"
        )
    return variables


def _with_older_role(message: Mapping[str, str]) -> Mapping[str, str]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


class ChatWriter:
    """Makes the answers to one request.

    Args:
        model: As the client named it.
        usage: Tokens so far.
        num_top_logprobs: Tokens that are shown beside each sampled one, at most.
        has_usage_chunk: Whether a stream ends with the usage.
    """

    def __init__(self, model: str, usage: Usage, *, num_top_logprobs: int, has_usage_chunk: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._usage = usage
        self._num_top_logprobs = num_top_logprobs
        self._has_usage_chunk = has_usage_chunk

    def whole(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """The answer as one object."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": chat_logprobs(choice.logprobs, self._num_top_logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": self._usage.as_json(),
        }

    async def chunks(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream; ``pieces`` is closed with it, and what it raises is raised.

        The role comes before the first text of each choice.
        """
        begun: set[int] = set()
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                self._usage.add(piece)
                if not piece.has_news:
                    continue
                if piece.choice not in begun:
                    begun.add(piece.choice)
                    yield self._chunk(piece.choice, {"role": "assistant", "content": ""})
                yield self._chunk(
                    piece.choice,
                    {"content": piece.text} if piece.text else {},
                    finish_reason=piece.finish_reason,
                    logprobs=chat_logprobs(piece.logprobs, self._num_top_logprobs),
                )
        if self._has_usage_chunk:
            yield {**self._head, "object": _CHUNK, "choices": [], "usage": self._usage.as_json()}

    def _chunk(
        self, index: int, delta: Mapping[str, str], *, finish_reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._has_usage_chunk else {}
        return {**self._head, "object": _CHUNK, "choices": [choice], **usage}


_CHUNK = "chat.completion.chunk"
