"""Fields of ``/v1/messages``, and the chat that they ask to answer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.gateway.errors import RequestError
from weft.gateway.openai.chat import VARIABLES, ChatRequest, chat_request, effort_field, json_schema, template_values
from weft.gateway.openai.fields import Field, Fields, boolean, check_utf8, ignored, integer, nested, one_of, unsupported
from weft.gateway.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEXT_CHARS,
    CallArguments,
    ChatBuilder,
    TextPart,
    name_in,
    parse_text,
    text_of,
)
from weft.gateway.openai.text_request import (
    CORE,
    MAX_INT32,
    MAX_STOPS,
    MODEL,
    SAMPLING,
    TIMEOUT,
    parse_common,
    parse_stops,
    timeout_s,
)
from weft.gateway.openai.tokenize import TokenizeRequest, chat_tokens
from weft.gateway.openai.tools.request import ToolUse, make_tool_use, read_function, tools_field

_ROLE_HINTS = {"developer": "; it goes into the field 'system'"}
#: What parts and blocks may have and what changes nothing here.
_WITHOUT_EFFECT = ("cache_control", "citations", "signature", "data", "is_error", "caller", "toolset_name")
_TEXT = TextPart(("text",), _WITHOUT_EFFECT)


def parse_chat(fields: Fields, name: str = "messages") -> list[dict[str, Any]]:
    """Messages for the fields ``system`` and ``name``. Raises RequestError."""
    chat = ChatBuilder(joins_texts=True)
    if fields.raw("system"):
        chat.add_text("system", parse_text(fields, "system", _TEXT))
    role = ""
    for role, message in fields.objects(name, MAX_MESSAGES, _BLOCKS, "role", hints=_ROLE_HINTS):
        if isinstance(message.raw("content"), str):
            chat.add_text(role, parse_text(message, "content", _TEXT))
        else:
            _blocks(message, role, chat)
        message.finish()
    if not role:
        raise RequestError(f"'{name}' must be an array with at least one message", param=name)
    return chat.messages


def _blocks(message: Fields, role: str, chat: ChatBuilder) -> None:
    blocks = _BLOCKS[role]
    hints = {"": f" in a message of the role '{role}'; pictures and documents are not supported"}
    if not message.raw("content"):
        param = message.param("content")
        raise RequestError(f"'{param}' must be a string, or an array of blocks, got nothing", param=param)
    for kind, block in message.objects("content", MAX_PARTS, ("text", *blocks), hints=hints):
        if kind == "text":
            chat.add_text(role, text_of(block, _TEXT))
            continue
        for known in _WITHOUT_EFFECT:
            block.raw(known)
        blocks[kind](block, chat)
        block.finish()


def _call(block: Fields, chat: ChatBuilder) -> None:
    arguments = block.object("input")
    given = {} if arguments is None else arguments.values
    check_utf8(given, block.param("input"))
    chat.add_call(name_in(block, "id"), name_in(block, "name"), CallArguments(given))


def _result(block: Fields, chat: ChatBuilder) -> None:
    chat.add_result(block, "tool_use_id", parse_text(block, "content", _TEXT) if block.raw("content") else "")


def _reasoning(block: Fields, chat: ChatBuilder) -> None:
    chat.add_reasoning(block.string("thinking", max_chars=MAX_TEXT_CHARS) or "")


def _nothing(block: Fields, chat: ChatBuilder) -> None:
    """Reasoning that only its author can read."""


#: Blocks besides texts, by the role of their message.
_BLOCKS: Mapping[str, Mapping[str, Callable[[Fields, ChatBuilder], None]]] = {
    "user": {"tool_result": _result},
    "assistant": {"tool_use": _call, "thinking": _reasoning, "redacted_thinking": _nothing},
    "system": {},
}


#: By type of ``tool_choice``: what a chat calls it.
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")


#: Of the prompt; ``count_tokens`` has them too.
PROMPT_FIELDS = (
    Field("messages", f"array of up to {MAX_MESSAGES} messages", "the chat so far", "required", parse_chat),
    Field("system", "string, or array of text blocks", "a first message of the role system"),
    tools_field(partial(read_function, schema_name="input_schema"), "custom", default="custom"),
    nested(
        "tool_choice",
        (
            one_of("type", tuple(_CHOICES), "whether the model calls one", "auto"),
            Field("name", "string", "of the function, for `tool`", read=Fields.raw),
            boolean("disable_parallel_tool_use", "an answer may have one call at most"),
        ),
    ),
    nested(
        "thinking",
        (
            one_of("type", _THINKING, "`enable_thinking` for the chat template: false for `disabled`"),
            one_of("display", ("summarized", "omitted"), "`omitted`: the answer has no `thinking`", "summarized"),
            *ignored("budget_tokens"),
        ),
    ),
    nested(
        "output_config",
        (
            effort_field("effort"),
            nested(
                "format",
                (
                    one_of("type", ("json_schema",), "a [grammar](structured-output.md)"),
                    Field("schema", "object", "JSON schema of the answer", read=Fields.mapping),
                ),
            ),
        ),
    ),
    VARIABLES,
    *ignored("cache_control", "context_management"),
    unsupported("output_format", "its newer name is 'output_config.format'"),
    unsupported("mcp_servers", "no tool is run here"),
    unsupported("speed", harmless=("standard",)),
)
FIELDS = (
    *PROMPT_FIELDS,
    integer("max_tokens", 1, MAX_INT32, "most tokens of an answer", "required"),
    Field("stop_sequences", f"up to {MAX_STOPS} strings", "where the answer ends", read=parse_stops),
    *(row for row in SAMPLING if row.name in ("temperature", "top_p", "top_k")),
    *ignored("metadata", "inference_geo", "diagnostics"),
    unsupported("service_tier", harmless=("auto", "standard_only")),
    unsupported("container", "no tool is run here"),
    *CORE,
)
COUNT_FIELDS = (*PROMPT_FIELDS, MODEL, TIMEOUT)


def parse(fields: Fields, headers: Mapping[str, str]) -> ChatRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(FIELDS)
    sampling = {row.name: own[row.name] for row in SAMPLING if row.name in own}
    if "max_tokens" not in own:
        raise RequestError("'max_tokens' is missing; give the most tokens of an answer", param="max_tokens")
    sampling["max_tokens"] = own["max_tokens"]
    if "stop_sequences" in own:
        sampling["stop"] = own["stop_sequences"]
    form = own.get("output_config", {}).get("format")
    if form is not None:
        sampling["response_format"] = json_schema(form, "output_config.format")
    return chat_request(
        parse_common(fields, sampling, headers, own),
        _template(own),
        "output_config.format",
        shows_reasoning=own.get("thinking", {}).get("display") != "omitted",
    )


def parse_count(fields: Fields, headers: Mapping[str, str]) -> TokenizeRequest:
    """Parse a body of ``count_tokens``. Raises RequestError."""
    own = fields.read(COUNT_FIELDS)
    return chat_tokens(own, _template(own), timeout_s(fields, headers))


def _template(own: Mapping[str, Any]) -> dict[str, Any]:
    thinking = own.get("thinking", {}).get("type")
    variables = {"enable_thinking": thinking != "disabled"} if thinking else {}
    given = {**own, "continue_final_message": own["messages"][-1]["role"] == "assistant"}
    return template_values(given, _tool_use(own), own.get("output_config", {}).get("effort"), **variables)


def _tool_use(own: Mapping[str, Any]) -> ToolUse | None:
    given = own.get("tool_choice", {})
    choice, is_parallel = _CHOICES[given.get("type", "auto")], not given.get("disable_parallel_tool_use", False)
    named = given.get("name", "") if choice == "function" else None
    return make_tool_use(own.get("tools"), choice, named, is_parallel=is_parallel)
