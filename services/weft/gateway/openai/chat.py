"""``/v1/chat/completions``: parses the body and formats responses."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp

from weft.gateway.errors import RequestError
from weft.gateway.openai import tools as formats
from weft.gateway.openai.answer import AnswerForm, AnswerReader, message_of, reasoning_marks
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, boolean, check_utf8, integer, one_of, shown, unsupported
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, chat_logprobs
from weft.gateway.openai.messages import MAX_MESSAGES, as_sent, parse_messages
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import (
    COMMON,
    GRAMMAR_FIELDS,
    MAX_INT32,
    PARSES_SPECIAL_TOKENS,
    SAMPLING,
    SEARCH,
    UNSUPPORTED,
    TextRequest,
    parse_common,
)
from weft.gateway.openai.tools.formats import ToolFormat
from weft.gateway.openai.tools.request import TOOL_FIELDS, ToolUse, parse_tool_use
from weft.gateway.openai.writing import ResponseForm, text_response

MAX_TOP_LOGPROBS = 20
MAX_VARIABLES = 64
#: Values of ``reasoning_effort``; with the first one the model is not to reason.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: The template has added them already.
_NO_SPECIAL_TOKENS = {"add_special_tokens": False}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated body.

    Attributes:
        messages: See ``parse_messages``.
        add_generation_prompt: Whether the prompt ends with the start of the assistant's message.
        has_special_tokens: Whether special tokens in messages and variables are special, not text.
        tool_use: The tools that the model may call; None: none.
        shows_reasoning: Whether the answer has the model's reasoning.
        repeated: Fields of the answer that repeat the request.
        format_name: Name that ``response_format`` has in the body.
        continues: Whether the prompt ends with the text of the last message, which the answer continues.
    """

    common: TextRequest
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    has_special_tokens: bool
    tool_use: ToolUse | None = None
    shows_reasoning: bool = True
    repeated: Mapping[str, Any] = field(default_factory=dict)
    format_name: str = "response_format"
    continues: bool = False

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.common.model


def read_object(fields: Fields, name: str) -> Mapping[str, Any] | None:
    """A small object of anything. Raises RequestError."""
    variables: dict[str, Any] | None = fields.raw(name)
    if fields.object(name) is None or variables is None:
        return None
    if len(variables) > MAX_VARIABLES:
        raise RequestError(f"'{name}' has {len(variables)} fields; at most {MAX_VARIABLES} are taken", param=name)
    check_utf8(variables, name)
    return variables


def effort_field(name: str) -> Field:
    """A row for one of ``EFFORTS``."""
    return one_of(name, EFFORTS, "for the chat template, with `enable_thinking`")


VARIABLES = Field("chat_template_kwargs", "object", "variables for the chat template", read=read_object)
#: Of the template; a chat that is only tokenized has them too.
TEMPLATE_FIELDS = (
    Field("messages", f"array of up to {MAX_MESSAGES} messages", "the chat so far", "required", parse_messages),
    boolean("add_generation_prompt", "the prompt ends with the start of the assistant's message", "true"),
    boolean("continue_final_message", "the answer continues the last message, in place of `add_generation_prompt`"),
    VARIABLES,
    effort_field("reasoning_effort"),
    *TOOL_FIELDS,
)
_FIELDS = (
    *TEMPLATE_FIELDS,
    integer("max_completion_tokens", 0, MAX_INT32, "most tokens of an answer", "as many as fit"),
    integer("max_tokens", 0, MAX_INT32, "older name of `max_completion_tokens`"),
    boolean("include_reasoning", "the answer has `reasoning_content`", "true"),
    boolean("logprobs", "report log probabilities"),
    integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "and so many of the most likely tokens at each place", "0"),
    unsupported("functions", "their newer name is 'tools'"),
    unsupported("function_call", "its newer name is 'tool_choice'", ("none", "auto")),
    unsupported("modalities", "answers are text", (["text"],)),
    unsupported("audio", "answers are text"),
    unsupported("prediction", "the model's own 'speculation' drafts without it"),
    unsupported("web_search_options", "put what was found into a message"),
    unsupported("verbosity", "say in a message how long the answer should be", ("medium",)),
    unsupported("moderation"),
    unsupported("prompt_cache_options"),
    unsupported("chat_template", "the gateway's --chat-template MODEL=FILE sets it"),
    unsupported("documents", "give them in 'chat_template_kwargs', if the template has them"),
    unsupported("echo", "the messages do not come back"),
)


def template_values(
    own: Mapping[str, Any], tool_use: ToolUse | None, effort: str | None, name: str = "messages", **more: Any
) -> dict[str, Any]:
    """What a chat template is given, as fields of ``ChatRequest``, by the body's values.

    ``effort`` is one of ``EFFORTS``, ``name`` the field with the messages, and ``more`` are variables. Raises
    RequestError: two values exclude one another.
    """
    continues, prompts = own.get("continue_final_message", False), own.get("add_generation_prompt")
    if continues and prompts:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude one another: the answer is a new message, or "
            "it continues the last one; set one to false",
            param="continue_final_message",
        )
    known = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != EFFORTS[0]}
    return {
        "messages": own[name],
        "add_generation_prompt": not continues if prompts is None else prompts,
        "continues": continues,
        "variables": known | more | own.get("chat_template_kwargs", {}),
        "tool_use": tool_use,
    }


def json_schema(form: Mapping[str, Any], param: str) -> dict[str, Any]:
    """``response_format`` of the field ``param``, which has a schema. Raises RequestError: it has none."""
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"'{param}.schema' must be an object, got {shown(schema)}", param=f"{param}.schema")
    return {"type": "json_schema", "json_schema": {"name": form.get("name", "answer"), "schema": schema}}


def chat_request(
    common: TextRequest, template: Mapping[str, Any], format_name: str = "response_format", *, shows_reasoning: bool
) -> ChatRequest:
    """A request for the answer to a chat; ``template`` has the ``template_values``.

    ``format_name`` is the name of ``response_format`` in the body.
    """
    parameters = dict(common.parameters)
    has_special_tokens = bool(parameters.pop(PARSES_SPECIAL_TOKENS, False))  # those of the template always are
    return ChatRequest(
        replace(common, parameters={**parameters, **_NO_SPECIAL_TOKENS}),
        **template,
        has_special_tokens=has_special_tokens,
        shows_reasoning=shows_reasoning,
        format_name=format_name,
    )


def parse(fields: Fields, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    sampling, own = fields.read((*SAMPLING, *SEARCH, *UNSUPPORTED)), fields.read(_FIELDS)
    newer, older = own.get("max_completion_tokens"), own.get("max_tokens")
    if newer is not None and older not in (None, newer):
        raise RequestError(
            f"'max_tokens' is {older} and 'max_completion_tokens' is {newer}; give one", param="max_tokens"
        )
    # Without a limit, the output may fill the context; models clamp the number to that.
    sampling["max_tokens"] = next((most for most in (newer, older) if most is not None), MAX_INT32)
    if own.get("logprobs"):
        sampling["logprobs"] = own.get("top_logprobs", 0)
    elif "top_logprobs" in own:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    common = parse_common(fields, sampling, headers)
    template = template_values(own, parse_tool_use(own), own.get("reasoning_effort"))
    return chat_request(common, template, shows_reasoning=own.get("include_reasoning", True))


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

    def rest(choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        scores = choices[0].prompt_logprobs
        return {} if scores is None else {"prompt_logprobs": scores.by_id}

    return ResponseForm("chatcmpl-", "chat.completion", "chat.completion.chunk", choice, delta_choices, rest)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(reason: str | None, reader: AnswerReader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


async def render(request: ChatRequest, model: TextModel) -> str:
    """The prompt of a chat, by the model's template, on a thread; "" for a model without that takes messages.

    Raises RequestError or InternalError.
    """
    tool_use = request.tool_use
    if model.takes_messages and (tool_use or not model.template_source):
        if request.variables or request.continues or not request.add_generation_prompt or tool_use:
            raise RequestError(
                f"the model '{model.name}' takes of a chat its messages alone; leave out 'chat_template_kwargs', "
                "'add_generation_prompt', 'continue_final_message', 'reasoning_effort' and 'tools'",
                param="tools" if tool_use else "chat_template_kwargs",
            )
        return ""
    template, messages = model.template(), request.messages
    if request.continues and (model.takes_messages or "tool_calls" in messages[-1] or (tool_use and tool_use.forced)):
        raise RequestError(
            "the last message cannot be continued, as it has calls, a call is forced, or the model takes messages; "
            "end with a message of the user",
            param="messages",
        )
    if tool_use and not template.supports_tools:
        raise RequestError(
            f"the chat template of the model '{model.name}' has no place for tools; leave 'tools' out, or give the "
            f"model a template that reads the variable 'tools': the gateway's --chat-template {model.name}=FILE",
            param="tools",
            code="unsupported_parameter",
        )
    if not template.supports_developer_role:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    return await asyncio.to_thread(
        template.render,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        continues=request.continues,
        variables=request.variables,
        tools=tool_use.tools if tool_use else None,
        has_special_tokens=request.has_special_tokens,
    )


async def prepare(request: ChatRequest, model: TextModel) -> tuple[TextRequest, AnswerForm]:
    """What the model is asked, and what its answers may consist of.

    Raises RequestError or InternalError.
    """
    prompt, tool_use = await render(request, model), request.tool_use
    tool_format = formats.format_of(model.name, model.tool_parser, model.template_source) if tool_use else None
    marks = reasoning_marks(model.name, model.reasoning_parser, model.template_source)
    is_reasoning = marks is not None and request.add_generation_prompt and prompt.rstrip().endswith(marks.start)
    if marks is not None and request.continues:
        begun = request.messages[-1]["content"]
        is_reasoning = begun.rfind(marks.start) > begun.rfind(marks.end)
    answer = AnswerForm(marks, is_reasoning, request.shows_reasoning)
    common, sampling = request.common, dict(request.common.sampling)
    if model.takes_messages:
        common = replace(common, messages=json.dumps(as_sent(request.messages), ensure_ascii=False))
    if tool_use and tool_format:
        answer = replace(answer, tools=tool_format, schemas=tool_use.schemas, is_parallel=tool_use.is_parallel)
    if tool_use and tool_format and tool_use.forced:
        # The prompt ends with the start of the call, so that the model writes in its own format.
        reader_format, written, opening = formats.forced(tool_format)
        prompt += f"{marks.end}\n\n{written.opening}" if marks and is_reasoning else written.opening
        answer = replace(answer, marks=None, tools=reader_format, opening=opening)
        sampling = _without_grammar(sampling)
        sampling["structured_outputs"] = {"grammar": tool_use.grammar(written)}
        return replace(common, sampling=sampling, prompts=[prompt]), answer
    if tool_use and tool_format and (grammars := {n: v for n, v in sampling.items() if n in GRAMMAR_FIELDS}):
        calls = {"grammar": _calls_grammar(request, tool_use, tool_format, next(iter(grammars)))}
        sampling = {**_without_grammar(sampling), "structured_outputs": {"any_of": [calls, grammars]}}
    if (tool_format and tool_format.has_special_tokens) or (marks and marks.is_special):
        sampling.setdefault("skip_special_tokens", False)
    return replace(common, sampling=sampling, prompts=[prompt]), answer


def _without_grammar(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if name not in GRAMMAR_FIELDS}


def _calls_grammar(request: ChatRequest, tool_use: ToolUse, tools: ToolFormat, name: str) -> str:
    """Grammar of the calls that may stand in place of an answer in a format, which the field ``name`` asks for.

    Raises RequestError: there is none.
    """
    if tools.forced is not None:
        return tool_use.grammar(tools.forced)
    if tools.around is not None:
        return tool_use.free_grammar(tools.around)
    param = request.format_name if name == "response_format" else name
    raise RequestError(
        f"'{param}' and 'tools' cannot be combined for the model '{request.model}', which writes calls and texts in "
        f"messages of the format '{tools.name}'; send a 'tool_choice' that forces a call or forbids it, or leave one "
        "out",
        param=param,
        code="unsupported_parameter",
    )


async def _respond(request: ChatRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    common, answer = await prepare(request, model)
    form = _respond_form(common.sampling.get("logprobs", 0), answer)
    return await text_response(call, model, common, form)


_ALL_FIELDS = (*_FIELDS, *SAMPLING, *SEARCH, *COMMON, *UNSUPPORTED)
ENDPOINT = Endpoint("/v1/chat/completions", TextModel, parse, _respond, _ALL_FIELDS, operation="chat")
