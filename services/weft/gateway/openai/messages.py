"""Messages of a chat: what clients send, and what chat templates take."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.gateway.errors import RequestError
from weft.gateway.json_text import parse_json
from weft.gateway.openai.fields import Fields, check_utf8, checked_string, shown

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TEXT_CHARS = 16 << 20
MAX_NAME_CHARS = 256

MAX_CALLS = 256
MAX_ARGUMENTS_CHARS = 4 << 20
#: What Anthropic's interface calls arguments that are no JSON object.
INVALID_JSON = "INVALID_JSON"

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_HINTS = {"function": "; its newer name is 'tool', with 'tool_call_id'"}
_PART_HINTS = {"": "; pictures, audio and files are not supported"}


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
    given = fields.objects(name, MAX_MESSAGES, ROLES, "role", hints=_ROLE_HINTS)
    messages = [_message(message, role) for role, message in given]
    if not messages:
        raise RequestError(f"'{name}' must be an array with at least one message", param=name)
    return messages


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


def _message(fields: Fields, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role}
    if role == "assistant":
        message |= _calls(fields)
        if (reasoning := fields.string("reasoning_content", max_chars=MAX_TEXT_CHARS)) is not None:
            message["reasoning_content"] = reasoning
    if role == "tool":
        message["tool_call_id"] = fields.string("tool_call_id", max_chars=MAX_NAME_CHARS)
        if not message["tool_call_id"]:
            param = fields.param("tool_call_id")
            raise RequestError(
                f"'{param}' is missing; a message of the role 'tool' answers the call with that id", param=param
            )
    for unsupported in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        if unsupported not in message:  # an empty list of calls is none
            fields.reject(unsupported)
    has_content = fields.raw("content") is not None or "tool_calls" not in message
    message["content"] = parse_text(fields, "content", _TEXT_PART) if has_content else ""
    if (author := fields.string("name", max_chars=MAX_NAME_CHARS)) is not None:
        message["name"] = author
    fields.finish()
    return message


def _calls(fields: Fields) -> dict[str, Any]:
    """``tool_calls`` of an assistant's message; empty if it has none."""
    calls = [_call(call) for _, call in fields.objects("tool_calls", MAX_CALLS, ("function",), default="function")]
    return {"tool_calls": calls} if calls else {}


def _call(call: Fields) -> dict[str, Any]:
    function = call.object("function") or call.inner({}, call.param("function"))
    return made_call(name_in(call, "id"), name_in(function, "name"), parse_arguments(function))


def made_call(call_id: str, name: str, arguments: CallArguments) -> dict[str, Any]:
    """A call as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def name_in(fields: Fields, name: str) -> str:
    """An id or name that a call, or its result, must have. Raises RequestError."""
    given = fields.string(name, max_chars=MAX_NAME_CHARS)
    if not given:
        param = fields.param(name)
        raise RequestError(f"'{param}' is missing; send the call as it came in the answer", param=param)
    return given


def parse_arguments(function: Fields, *, takes_any: bool = False) -> CallArguments:
    """``arguments``, the text of a JSON object; absent ones are none.

    Raises RequestError; if it ``takes_any``, a text of anything else becomes the field ``INVALID_JSON``.
    """
    text, param = function.string("arguments", max_chars=MAX_ARGUMENTS_CHARS) or "{}", function.param("arguments")
    try:
        arguments = CallArguments(parse_json(text.encode()))
    except RequestError as error:
        if not takes_any:
            what = error.message.replace("the body", "it", 1)
            raise RequestError(f"'{param}' must be the text of a JSON object; {what}", param=param) from None
        arguments = CallArguments({INVALID_JSON: text})
    check_utf8(arguments, param)
    return arguments


class TextPart(NamedTuple):
    """What text parts are: their types, and further fields that have no effect and are not listed as ignored."""

    types: Sequence[str]
    fields: Sequence[str] = ()


_TEXT_PART = TextPart(("text",))


def parse_text(fields: Fields, name: str, allowed: TextPart) -> str:
    """A string, or text parts, joined by line breaks. Raises RequestError."""
    content, param = fields.raw(name), fields.param(name)
    if isinstance(content, str):
        return checked_string(content, param, max_chars=MAX_TEXT_CHARS)
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{param}' must be a string, or an array of text parts, got {shown(content)}", param=param)
    parts = fields.objects(name, MAX_PARTS, allowed.types, hints=_PART_HINTS)
    return "\n".join(text_of(part, allowed) for _, part in parts)


def text_of(part: Fields, allowed: TextPart) -> str:
    """The text of a part. Raises RequestError."""
    for known in allowed.fields:
        part.raw(known)
    text = checked_string(part.raw("text"), part.param("text"), max_chars=MAX_TEXT_CHARS)
    part.finish()
    return text


class ChatBuilder:
    """Makes messages for chat templates of what other interfaces have as items or blocks: texts, calls and results.

    What one turn of the assistant consists of becomes one message, as far as templates can show it, and so do system
    messages in a row; if it ``joins_texts``, all texts in a row of one role do.
    """

    def __init__(self, *, joins_texts: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()
        self._joins_texts = joins_texts

    def add_text(self, role: str, text: str) -> None:
        """A text of the system, the user or the assistant."""
        last = self.messages[-1] if self.messages else {}
        is_system = {role, last.get("role")} <= {"system", "developer"}
        is_turn = role == last.get("role") == "assistant" and ("tool_calls" in last or not last["content"])
        if is_system or is_turn or (self._joins_texts and role == last.get("role")):
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text
        else:
            self.messages.append({"role": role, "content": text})

    def add_reasoning(self, text: str) -> None:
        """The assistant's reasoning, before its text and calls."""
        last = self._assistant("content", "tool_calls")
        last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), text)))

    def add_call(self, call_id: str, name: str, arguments: CallArguments) -> None:
        """A call of the assistant."""
        self._call_ids.add(call_id)
        self._assistant().setdefault("tool_calls", []).append(made_call(call_id, name, arguments))

    def add_result(self, fields: Fields, name: str, text: str) -> None:
        """The result of the call whose id is the field ``name``. Raises RequestError: there was none."""
        call_id, param = name_in(fields, name), fields.param(name)
        if call_id not in self._call_ids:
            raise RequestError(
                f"'{param}' is {shown(call_id)}, and no call before it has that id; send the call too, before its "
                "result",
                param=param,
            )
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, *before: str) -> dict[str, Any]:
        """The last message if it is the assistant's, without any of the fields ``before``; else a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or any(map(self.messages[-1].get, before)):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
