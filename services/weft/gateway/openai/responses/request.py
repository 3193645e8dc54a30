"""Fields of ``/v1/responses``, and the chat that they ask to answer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.gateway.errors import RequestError
from weft.gateway.openai.chat import (
    MAX_TOP_LOGPROBS,
    VARIABLES,
    ChatRequest,
    chat_request,
    effort_field,
    json_schema,
    read_object,
    template_values,
)
from weft.gateway.openai.fields import (
    Field,
    Fields,
    boolean,
    check_utf8,
    checked_string,
    ignored,
    integer,
    nested,
    one_of,
    shown,
    string,
    unsupported,
)
from weft.gateway.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEXT_CHARS,
    ChatBuilder,
    TextPart,
    name_in,
    parse_arguments,
    parse_text,
)
from weft.gateway.openai.text_request import CORE, MAX_INT32, SAMPLING, SEARCH, SERVICE_TIER, UNSUPPORTED, parse_common
from weft.gateway.openai.tools.request import CHOICES, ToolUse, make_tool_use, read_function, tools_field

_HINTS = {"item_reference": "; nothing is stored here, so send the item itself"}
ROLES = ("user", "assistant", "system", "developer")
#: Facts of a part or an item that came in an answer; they change nothing.
_PART = TextPart(("input_text", "output_text", "text"), ("annotations", "logprobs"))
_OF_ANSWERS = ("id", "status", "phase", "encrypted_content")


def parse_input(fields: Fields, name: str, instructions: str | None) -> list[dict[str, Any]]:
    """Messages for ``instructions`` and the field ``name``, a text or items. Raises RequestError."""
    chat = ChatBuilder()
    if instructions:
        chat.add_text("system", instructions)
    given = fields.raw(name)
    if isinstance(given, str):
        chat.add_text("user", checked_string(given, name, max_chars=MAX_TEXT_CHARS))
        return chat.messages
    if not isinstance(given, list):
        raise RequestError(f"'{name}' must be a string, or an array of items, got {shown(given)}", param=name)
    for kind, item in fields.objects(name, MAX_MESSAGES, _ITEMS, default="message", hints=_HINTS):
        for known in _OF_ANSWERS:
            item.raw(known)
        _ITEMS[kind](item, chat)
        item.finish()
    if not chat.messages:
        raise RequestError(f"'{name}' has no message; send a string, or an array of items", param=name)
    return chat.messages


def _message(item: Fields, chat: ChatBuilder) -> None:
    role, param = item.raw("role"), item.param("role")
    if role not in ROLES:
        raise RequestError(f"'{param}' must be one of {', '.join(ROLES)}, got {shown(role)}", param=param)
    chat.add_text(role, parse_text(item, "content", _PART))


def _call(item: Fields, chat: ChatBuilder) -> None:
    chat.add_call(name_in(item, "call_id"), name_in(item, "name"), parse_arguments(item, takes_any=True))


def _result(item: Fields, chat: ChatBuilder) -> None:
    text = "" if item.raw("output") == [] else parse_text(item, "output", _PART)
    chat.add_result(item, "call_id", text)


def _reasoning(item: Fields, chat: ChatBuilder) -> None:
    texts = []
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.array(name, MAX_PARTS):
            texts.append(parse_text(item, name, TextPart((kind,))))
    if texts:  # a summary is for who lacks the text itself
        chat.add_reasoning(texts[0])


_ITEMS: Mapping[str, Callable[[Fields, ChatBuilder], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
}


_LOGPROBS = "message.output_text.logprobs"
NOTHING_KEPT = "nothing is kept here; send the whole conversation as 'input'"
#: Under other names here, or not for one answer.
_NOT_HERE = {"n", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}


def _input(fields: Fields, name: str) -> list[dict[str, Any]]:
    return parse_input(fields, name, fields.string("instructions", max_chars=MAX_TEXT_CHARS))


_included = partial(Fields.array, max_items=32)
_FORMAT = (
    one_of("type", ("text", "json_object", "json_schema"), "a [grammar](structured-output.md)", "text"),
    string("name", 256, "of the schema"),
    string("description", MAX_TEXT_CHARS, "of the schema, which the model is not told"),
    Field("schema", "object", "JSON schema of the answer", read=Fields.mapping),
    boolean("strict", "comes back; the answer fits the schema in either case"),
)
FIELDS = (
    Field("input", "string, or array of items", "the chat so far", "required", _input),
    string("instructions", MAX_TEXT_CHARS, "a first message of the role system"),
    tools_field(read_function),
    Field(
        "tool_choice",
        "`auto`, `none`, `required`, or an object: a function, or `allowed_tools`",
        "whether it calls one",
        "auto",
        Fields.raw,
    ),
    boolean("parallel_tool_calls", "an answer may have several calls", "true"),
    nested("text", (nested("format", _FORMAT), unsupported("verbosity", "say it in a message", ("medium",)))),
    nested("reasoning", (effort_field("effort"), *ignored("summary", "generate_summary"))),
    VARIABLES,
    integer("max_output_tokens", 1, MAX_INT32, "most tokens of an answer", "as many as fit"),
    integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "report so many of the most likely tokens at each place", "0"),
    Field("include", "array of strings", f"`{_LOGPROBS}`; others have no effect", read=_included),
    Field("metadata", "object", "comes back in the response", read=read_object),
    boolean("store", "comes back as false: nothing is kept"),
    *ignored(
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
        "client_metadata",
        "max_tool_calls",
        "context_management",
    ),
    nested("stream_options", ignored("include_obfuscation", "include_usage")),
    SERVICE_TIER,
    unsupported("previous_response_id", NOTHING_KEPT),
    unsupported("conversation", NOTHING_KEPT),
    unsupported("background", "take the answer as a stream"),
    unsupported("prompt", "templates of prompts are not kept here; send 'instructions' and 'input'"),
    unsupported("truncation", "send a shorter 'input'", ("disabled",)),
    unsupported("moderation"),
    unsupported("prompt_cache_options"),
    *(row for row in SAMPLING if row.name not in _NOT_HERE),
    *(unsupported(row.name, "POST /v1/chat/completions has it", (1,)) for row in SEARCH),
    *CORE,
    *UNSUPPORTED,
)


def parse(fields: Fields, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(FIELDS)
    sampling = {row.name: own[row.name] for row in SAMPLING if row.name in own}
    sampling["max_tokens"] = own.get("max_output_tokens", MAX_INT32)
    form = own.get("text", {}).get("format", {})
    kind = form.get("type", "text")
    if kind != "text":
        sampling["response_format"] = json_schema(form, "text.format") if kind == "json_schema" else {"type": kind}
    if (num_top := own.get("top_logprobs", 0)) or _LOGPROBS in own.get("include", ()):
        sampling["logprobs"] = num_top
    template = template_values(own, _tool_use(own), own.get("reasoning", {}).get("effort"), "input")
    common = parse_common(fields, sampling, headers, own)
    chat = chat_request(common, template, "text.format", shows_reasoning=True)
    repeated = _repeated(fields, own, form)
    for name, value in repeated.items():
        check_utf8(value, name)
    return replace(chat, repeated=repeated)


def _tool_use(own: Mapping[str, Any]) -> ToolUse | None:
    choice, tools = own.get("tool_choice", "auto"), own.get("tools")
    is_parallel = own.get("parallel_tool_calls", True)
    if isinstance(choice, str) and choice in CHOICES:
        return make_tool_use(tools, choice, is_parallel=is_parallel)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and choice.get("name") is not None:
        return make_tool_use(tools, choice, choice["name"])
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required") and isinstance(choice.get("tools"), list):
        named = [one.get("name") for one in choice["tools"] if isinstance(one, dict)]
        shown_tools, schemas = tools or ((), {})
        allowed = {name: schema for name, schema in schemas.items() if name in named}
        if schemas and not allowed:
            raise RequestError("'tool_choice.tools' names none of 'tools'", param="tool_choice")
        told = [tool for tool in shown_tools if tool["function"]["name"] in allowed]
        return make_tool_use((told, allowed), choice["mode"], is_parallel=is_parallel)
    raise RequestError(
        '\'tool_choice\' must be "auto", "none", "required", {"type": "function", "name": NAME}, or '
        f'{{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}}, got {shown(choice)}',
        param="tool_choice",
    )


def _repeated(fields: Fields, own: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request; what is not given is as it is by default."""
    kind = form.get("type", "text")
    schema = {"name": "answer", "description": None, "strict": False, **form} if kind == "json_schema" else {}
    blank = {"description": None, "parameters": None, "strict": None}
    return {
        "instructions": own.get("instructions"),
        "max_output_tokens": own.get("max_output_tokens"),
        "max_tool_calls": None,
        "parallel_tool_calls": own.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": own.get("reasoning", {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "background": False,
        "temperature": own.get("temperature", 1.0),
        "top_p": own.get("top_p", 1.0),
        "presence_penalty": own.get("presence_penalty", 0.0),
        "frequency_penalty": own.get("frequency_penalty", 0.0),
        "top_logprobs": own.get("top_logprobs", 0),
        "text": {"format": {"type": kind, **schema}},
        "tool_choice": own.get("tool_choice", "auto"),
        "tools": [blank | tool for tool in fields.raw("tools") or ()],
        "truncation": "disabled",
        "metadata": own.get("metadata", {}),
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
