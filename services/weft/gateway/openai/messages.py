"""Messages of a chat: what clients send, and what chat templates take."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from weft.gateway.errors import RequestError
from weft.gateway.json_text import is_encodable, parse_json
from weft.gateway.openai.fields import Fields, checked_string, shown

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TEXT_CHARS = 16 << 20
MAX_NAME_CHARS = 256

MAX_CALLS = 256
MAX_ARGUMENTS_CHARS = 4 << 20

ROLES = ("system", "developer", "user", "assistant", "tool")


class CallArguments(dict[str, Any]):
    """Arguments of a call in a message: an object for templates that look into it, its JSON for those that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def parse_messages(fields: Fields, name: str = "messages") -> list[dict[str, Any]]:
    """Parse messages with ``role``, ``content`` as one string, and the other fields of chat templates, if given.

    These are ``name``, ``tool_calls`` with arguments as objects, ``tool_call_id`` and ``reasoning_content``. Text parts
    of a message are joined by line breaks. Raises RequestError if there are none, or one is invalid; the message has
    its path.
    """
    messages = fields.array(name, MAX_MESSAGES)
    if not messages:
        raise RequestError(f"'{name}' must be an array with at least one message", param=name)
    return [_message(fields, value, f"{name}[{index}]") for index, value in enumerate(messages)]


def as_sent(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for another server of this interface: arguments of calls are text again."""
    return [
        {**message, "tool_calls": [_sent_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _sent_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": str(call["function"]["arguments"])}}


def _message(body: Fields, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"'{path}' must be an object with 'role' and 'content', got {shown(value)}", param=path)
    fields = body.inner(value, path)
    role = fields.raw("role")
    if role not in ROLES:
        cure = "; its newer name is 'tool', with 'tool_call_id'" if role == "function" else ""
        raise RequestError(
            f"'{path}.role' must be one of {', '.join(ROLES)}, got {shown(role)}{cure}", param=f"{path}.role"
        )
    message: dict[str, Any] = {"role": role}
    if role == "assistant":
        message |= _calls(fields)
        if (reasoning := fields.string("reasoning_content", max_chars=MAX_TEXT_CHARS)) is not None:
            message["reasoning_content"] = reasoning
    if role == "tool":
        message["tool_call_id"] = fields.string("tool_call_id", max_chars=MAX_NAME_CHARS)
        if not message["tool_call_id"]:
            raise RequestError(
                f"'{path}.tool_call_id' is missing; a message of the role 'tool' answers the call with that id",
                param=f"{path}.tool_call_id",
            )
    for unsupported in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        if unsupported not in message:  # an empty list of calls is none
            fields.reject(unsupported)
    has_content = fields.raw("content") is not None or "tool_calls" not in message
    message["content"] = _content(fields) if has_content else ""
    if (author := fields.string("name", max_chars=MAX_NAME_CHARS)) is not None:
        message["name"] = author
    fields.finish()
    return message


def _calls(fields: Fields) -> dict[str, Any]:
    """``tool_calls`` of an assistant's message; empty if it has none."""
    calls = fields.array("tool_calls", MAX_CALLS)
    path = fields.param("tool_calls")
    return (
        {"tool_calls": [_call(fields, call, f"{path}[{index}]") for index, call in enumerate(calls)]} if calls else {}
    )


def _call(message: Fields, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise RequestError(
            f"'{path}' must be an object with 'id', 'type': \"function\" and 'function', got {shown(value)}", param=path
        )
    call = message.inner(value, path)
    function = call.object("function") or call.inner({}, f"{path}.function")
    call_id, name = call.string("id", max_chars=MAX_NAME_CHARS), function.string("name", max_chars=MAX_NAME_CHARS)
    for given, param in ((call_id, call.param("id")), (name, function.param("name"))):
        if not given:
            raise RequestError(f"'{param}' is missing; send the call as it came in the answer", param=param)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(function)}}


def _arguments(function: Fields) -> CallArguments:
    text, param = function.string("arguments", max_chars=MAX_ARGUMENTS_CHARS) or "{}", function.param("arguments")
    try:
        arguments = CallArguments(parse_json(text.encode()))
    except RequestError as error:
        raise RequestError(
            f"'{param}' must be the text of a JSON object; {error.message.replace('the body', 'it', 1)}", param=param
        ) from None
    if not is_encodable(str(arguments)):
        raise RequestError(f"'{param}' has half of a surrogate pair; send whole characters", param=param)
    return arguments


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
