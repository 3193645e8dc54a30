"""``/v1/chat/completions``: parses the body and formats responses."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp

from weft.gateway.errors import RequestError
from weft.gateway.json_text import is_encodable, parse_json
from weft.gateway.openai import tools as formats
from weft.gateway.openai.answer import AnswerForm, AnswerReader, message_of, reasoning_marks
from weft.gateway.openai.chat_template import ChatTemplate
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Fields, shown
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, ResponseForm, chat_logprobs, text_response
from weft.gateway.openai.messages import parse_messages
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import (
    GRAMMAR_FIELDS,
    MAX_INT32,
    PARSES_SPECIAL_TOKENS,
    TextRequest,
    parse_common,
    parse_sampling,
)
from weft.gateway.openai.tools.formats import ToolFormat
from weft.gateway.openai.tools.request import ToolUse, parse_tool_use

MAX_TOP_LOGPROBS = 20
MAX_VARIABLES = 64
MAX_EFFORT_CHARS = 64
#: Values of ``reasoning_effort``; with the first one the model is not to reason.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: The template has added them already.
_NO_SPECIAL_TOKENS = {"add_special_tokens": False}
#: Unsupported fields of OpenAI, with their values that have no effect.
_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "moderation": (),
    "prompt_cache_options": (),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated body.

    Attributes:
        common: Fields that both endpoints share.
        messages: See ``parse_messages``.
        add_generation_prompt: Whether the prompt ends with the start of the assistant's message.
        variables: Additional template variables.
        has_special_tokens: Whether special tokens in messages and variables are special, not text.
        tool_use: The tools that the model may call; None: none.
        shows_reasoning: Whether the answer has the model's reasoning.
    """

    common: TextRequest
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    has_special_tokens: bool
    tool_use: ToolUse | None
    shows_reasoning: bool

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.common.model


def parse(data: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a body of JSON. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    fields = Fields(parse_json(data))
    for name, harmless in _UNSUPPORTED.items():
        fields.reject(name, harmless)
    sampling = parse_sampling(fields)
    # Without a limit, the output may fill the context; models clamp the number to that.
    sampling["max_tokens"] = _max_tokens(fields) or MAX_INT32
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        sampling["logprobs"] = top_logprobs or 0
    elif top_logprobs is not None:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    messages = parse_messages(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt")
    variables = _variables(fields)
    tool_use = parse_tool_use(fields)
    shows_reasoning = fields.boolean("include_reasoning") is not False
    common = parse_common(fields, sampling, headers)
    parameters = dict(common.parameters)
    has_special_tokens = bool(parameters.pop(PARSES_SPECIAL_TOKENS, False))  # those of the template always are
    return ChatRequest(
        replace(common, parameters={**parameters, **_NO_SPECIAL_TOKENS}),
        messages,
        add_generation_prompt is not False,
        variables,
        has_special_tokens,
        tool_use,
        shows_reasoning,
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
    """Variables of the template: those given, and ``reasoning_effort`` and ``enable_thinking`` by the effort."""
    variables: dict[str, Any] | None = fields.raw("chat_template_kwargs")
    if fields.object("chat_template_kwargs") is None or variables is None:
        variables = {}
    if len(variables) > MAX_VARIABLES:
        raise RequestError(
            f"'chat_template_kwargs' has {len(variables)} variables; at most {MAX_VARIABLES} are taken",
            param="chat_template_kwargs",
        )
    if not is_encodable(json.dumps(variables, ensure_ascii=False)):
        raise RequestError(
            "'chat_template_kwargs' has half of a surrogate pair; send whole characters", param="chat_template_kwargs"
        )
    effort = fields.string("reasoning_effort", max_chars=MAX_EFFORT_CHARS)
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise RequestError(
            f"'reasoning_effort' must be one of {', '.join(EFFORTS)}, got {shown(effort)}", param="reasoning_effort"
        )
    return {"reasoning_effort": effort, "enable_thinking": effort != EFFORTS[0]} | variables


def _respond_form(num_top_logprobs: int, answer: AnswerForm) -> ResponseForm:
    readers: dict[int, AnswerReader] = {}

    def choice(index: int, choice: CollectedChoice) -> dict[str, Any]:
        reader = AnswerReader(answer)
        message = message_of([*reader.read(choice.text), *reader.finish()])
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs, num_top_logprobs),
            "finish_reason": _finish_reason(choice.finish_reason, reader),
        }

    def delta_choices(delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        index = delta.choice
        if index not in readers:  # the role precedes the first text of each choice
            readers[index] = AnswerReader(answer)
            yield _chunk(index, {"role": "assistant", "content": ""})
        reader, logprobs = readers[index], chat_logprobs(delta.logprobs, num_top_logprobs)
        deltas = reader.read(delta.text)
        if delta.finish_reason:
            deltas += reader.finish()
        if not deltas and (logprobs or delta.finish_reason):
            deltas = [{}]
        for number, each in enumerate(deltas, 1):
            reason = _finish_reason(delta.finish_reason, reader) if number == len(deltas) else None
            yield _chunk(index, each, logprobs, reason)
            logprobs = None

    return ResponseForm("chatcmpl-", "chat.completion", "chat.completion.chunk", choice, delta_choices)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(reason: str | None, reader: AnswerReader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


async def _respond(request: ChatRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    template, messages, tool_use = model.template(), request.messages, request.tool_use
    tool_format = _tool_format(model, template, tool_use, request.common.sampling) if tool_use else None
    if not template.supports_developer_role:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    prompt = await asyncio.to_thread(
        template.render,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.variables,
        tools=tool_use.tools if tool_use else None,
        has_special_tokens=request.has_special_tokens,
    )
    marks = reasoning_marks(model.name, model.reasoning_parser, template.source)
    is_reasoning = marks is not None and request.add_generation_prompt and prompt.rstrip().endswith(marks.start)
    answer = AnswerForm(marks, is_reasoning, request.shows_reasoning)
    common, sampling = request.common, dict(request.common.sampling)
    if tool_use and tool_format:
        answer = replace(answer, tools=tool_format, schemas=tool_use.schemas, is_parallel=tool_use.is_parallel)
    if tool_use and tool_format and tool_use.forced:
        # The prompt ends with the start of the call, so that the model writes in its own format.
        reader_format, written, opening = formats.forced(tool_format)
        prompt += f"{marks.end}\n\n{written.opening}" if marks and is_reasoning else written.opening
        answer = replace(answer, marks=None, tools=reader_format, opening=opening)
        sampling = {name: value for name, value in sampling.items() if name not in GRAMMAR_FIELDS}
        sampling["structured_outputs"] = {"grammar": tool_use.grammar(written)}
    elif (tool_format and tool_format.has_special_tokens) or (marks and marks.is_special):
        sampling.setdefault("skip_special_tokens", False)
    form = _respond_form(common.sampling.get("logprobs", 0), answer)
    return await text_response(call, model, replace(common, sampling=sampling), [prompt], form)


def _tool_format(
    model: TextModel, template: ChatTemplate, tool_use: ToolUse, sampling: Mapping[str, Any]
) -> ToolFormat:
    """How the model writes tool calls. Raises RequestError if it cannot call the tools of the request."""
    if not template.supports_tools:
        raise RequestError(
            f"the chat template of the model '{model.name}' has no place for tools; leave 'tools' out, or give the "
            f"model a template that reads the variable 'tools': the gateway's --chat-template {model.name}=FILE",
            param="tools",
            code="unsupported_parameter",
        )
    grammar = next((name for name in GRAMMAR_FIELDS if _asks(sampling.get(name))), None)
    if grammar and not tool_use.forced:
        raise RequestError(
            f"'{grammar}' and 'tools' cannot be combined, since an answer is either a call or in that format; send "
            '\'tool_choice\' "none" or "required", or leave one out',
            param=grammar,
            code="unsupported_parameter",
        )
    return formats.format_of(model.name, model.tool_parser, template.source)


def _asks(grammar: Any) -> bool:
    """Whether the value of a grammar's field asks for one."""
    return grammar is not None and grammar != {"type": "text"}


ENDPOINT = Endpoint("/v1/chat/completions", TextModel, parse, _respond)
