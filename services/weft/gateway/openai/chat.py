"""``/v1/chat/completions``: parses the body and formats responses."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp

from weft.gateway.errors import RequestError
from weft.gateway.json_text import is_encodable
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, boolean, checked_string, integer, shown, unsupported
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, ResponseForm, chat_logprobs, text_response
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import (
    COMMON,
    MAX_INT32,
    PARSES_SPECIAL_TOKENS,
    SAMPLING,
    UNSUPPORTED,
    TextRequest,
    parse_common,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TEXT_CHARS = 16 << 20
MAX_NAME_CHARS = 256

ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")


def parse_messages(fields: Fields, name: str = "messages") -> list[dict[str, str]]:
    """Parse messages with ``role``, ``content`` as one string, and ``name`` if given.

    Text parts of a message are joined by line breaks. Raises RequestError if there are none, or one is invalid; the
    message has its path.
    """
    messages = fields.array(name, MAX_MESSAGES)
    if not messages:
        raise RequestError(f"'{name}' must be an array with at least one message", param=name)
    return [_message(fields, value, f"{name}[{index}]") for index, value in enumerate(messages)]


def _message(body: Fields, value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RequestError(f"'{path}' must be an object with 'role' and 'content', got {shown(value)}", param=path)
    fields = body.inner(value, path)
    role = fields.raw("role")
    if role in _TOOL_ROLES:
        raise RequestError(
            f"'{path}.role' is '{role}', and tools are not supported; use one of {', '.join(ROLES)}",
            param=f"{path}.role",
            code="unsupported_parameter",
        )
    if role not in ROLES:
        raise RequestError(f"'{path}.role' must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{path}.role")
    for name in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        fields.reject(name)
    message = {"role": role, "content": _content(fields)}
    if (author := fields.string("name", max_chars=MAX_NAME_CHARS)) is not None:
        message["name"] = author
    fields.finish()
    return message


def _content(fields: Fields) -> str:
    content, param = fields.raw("content"), fields.param("content")
    if isinstance(content, str):
        return checked_string(content, param, max_chars=MAX_TEXT_CHARS)
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{param}' must be a string, or an array of text parts, got {shown(content)}", param=param)
    parts = fields.array("content", MAX_PARTS) or []
    return "\n".join(_text(fields, part, f"{param}[{index}]") for index, part in enumerate(parts))


def _text(message: Fields, part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{path}' must be an object with 'type' and 'text', got {shown(part)}", param=path)
    if part.get("type") != "text":
        raise RequestError(
            f"'{path}.type' must be 'text', got {shown(part.get('type'))}; pictures, audio and files are not supported",
            param=f"{path}.type",
        )
    fields = message.inner(part, path)
    fields.raw("type")
    text = checked_string(fields.raw("text"), f"{path}.text", max_chars=MAX_TEXT_CHARS)
    fields.finish()
    return text


MAX_TOP_LOGPROBS = 20
MAX_VARIABLES = 64

#: The template has added them already.
_NO_SPECIAL_TOKENS = {"add_special_tokens": False}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated body.

    Attributes:
        common: Fields that both endpoints share.
        messages: Messages with ``role``, ``content`` and optionally ``name``.
        add_generation_prompt: Whether the prompt ends with the start of the assistant's message.
        variables: Additional template variables.
        has_special_tokens: Whether special tokens in messages and variables are special, not text.
    """

    common: TextRequest
    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    has_special_tokens: bool

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.common.model


def _variables(fields: Fields, name: str) -> Mapping[str, Any] | None:
    variables: dict[str, Any] | None = fields.raw(name)
    if fields.object(name) is None or variables is None:
        return None
    if len(variables) > MAX_VARIABLES:
        raise RequestError(f"'{name}' has {len(variables)} variables; at most {MAX_VARIABLES} are taken", param=name)
    if not is_encodable(json.dumps(variables, ensure_ascii=False)):
        raise RequestError(f"'{name}' has half of a surrogate pair; send whole characters", param=name)
    return variables


#: Of the template; a chat that is only tokenized has them too.
TEMPLATE_FIELDS = (
    Field("messages", f"array of up to {MAX_MESSAGES} messages", "the chat so far", "required", parse_messages),
    boolean("add_generation_prompt", "the prompt ends with the start of the assistant's message", "true"),
    Field("chat_template_kwargs", "object", "variables for the chat template", read=_variables),
)
_FIELDS = (
    *TEMPLATE_FIELDS,
    integer("max_completion_tokens", 1, MAX_INT32, "most tokens of an answer", "as many as fit"),
    integer("max_tokens", 1, MAX_INT32, "older name of `max_completion_tokens`"),
    boolean("logprobs", "report log probabilities"),
    integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "and so many of the most likely tokens at each place", "0"),
    unsupported("tools"),
    unsupported("tool_choice", harmless=("none", "auto")),
    unsupported("functions"),
    unsupported("function_call", harmless=("none", "auto")),
    unsupported("parallel_tool_calls", harmless=(True,)),
    unsupported("modalities", "answers are text", (["text"],)),
    unsupported("audio", "answers are text"),
    unsupported("prediction", "the model's own 'speculation' drafts without it"),
    unsupported("web_search_options", "put what was found into a message"),
    unsupported("reasoning_effort", "give the template's own variable in 'chat_template_kwargs'", ("none",)),
    unsupported("verbosity", "say in a message how long the answer should be", ("medium",)),
    unsupported("moderation"),
    unsupported("prompt_cache_options"),
    unsupported("chat_template", "the gateway's --chat-template MODEL=FILE sets it"),
    unsupported("continue_final_message", "render the prompt yourself and use /v1/completions"),
    unsupported("documents", "give them in 'chat_template_kwargs', if the template has them"),
    unsupported("echo", "the messages do not come back"),
)


def parse(fields: Fields, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    sampling, own = fields.read((*SAMPLING, *UNSUPPORTED)), fields.read(_FIELDS)
    newer, older = own.get("max_completion_tokens"), own.get("max_tokens")
    if newer is not None and older not in (None, newer):
        raise RequestError(
            f"'max_tokens' is {older} and 'max_completion_tokens' is {newer}; give one", param="max_tokens"
        )
    # Without a limit, the output may fill the context; models clamp the number to that.
    sampling["max_tokens"] = newer or older or MAX_INT32
    if own.get("logprobs"):
        sampling["logprobs"] = own.get("top_logprobs", 0)
    elif "top_logprobs" in own:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    common = parse_common(fields, sampling, headers)
    parameters = dict(common.parameters)
    has_special_tokens = bool(parameters.pop(PARSES_SPECIAL_TOKENS, False))  # those of the template always are
    return ChatRequest(
        replace(common, parameters={**parameters, **_NO_SPECIAL_TOKENS}),
        own["messages"],
        own.get("add_generation_prompt", True),
        own.get("chat_template_kwargs", {}),
        has_special_tokens,
    )


def _respond_form(num_top_logprobs: int) -> ResponseForm:
    begun: set[int] = set()

    def choice(index: int, choice: CollectedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, num_top_logprobs),
            "finish_reason": choice.finish_reason,
        }

    def delta_choices(delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        if delta.choice not in begun:  # the role precedes the first text of each choice
            begun.add(delta.choice)
            first = {"role": "assistant", "content": ""}
            yield {"index": delta.choice, "delta": first, "logprobs": None, "finish_reason": None}
        yield {
            "index": delta.choice,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(delta.logprobs, num_top_logprobs),
            "finish_reason": delta.finish_reason,
        }

    return ResponseForm("chatcmpl-", "chat.completion", "chat.completion.chunk", choice, delta_choices)


async def render(request: ChatRequest, model: TextModel) -> str:
    """The prompt of a chat, by the model's template, on a thread; "" for a model without that takes messages.

    Raises RequestError or InternalError.
    """
    if model.takes_messages and not model.template_source:
        if request.variables or not request.add_generation_prompt:
            raise RequestError(
                f"the model '{model.name}' has no chat template; leave out 'chat_template_kwargs' and "
                "'add_generation_prompt'",
                param="chat_template_kwargs",
            )
        return ""
    template, messages = model.template(), request.messages
    if not template.supports_developer_role:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    return await asyncio.to_thread(
        template.render,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.variables,
        has_special_tokens=request.has_special_tokens,
    )


async def _respond(request: ChatRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    prompt, common = await render(request, model), request.common
    if model.takes_messages:
        common = replace(common, messages=json.dumps(request.messages, ensure_ascii=False))
    form = _respond_form(common.sampling.get("logprobs", 0))
    return await text_response(call, model, common, [prompt], form)


ENDPOINT = Endpoint("/v1/chat/completions", TextModel, parse, _respond, (*_FIELDS, *SAMPLING, *COMMON, *UNSUPPORTED))
