"""Validation of chat messages: roles and texts."""

from typing import Any

from weft.gateway.errors import RequestError
from weft.gateway.openai.fields import Fields, checked_string, shown

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TEXT_CHARS = 16 << 20
MAX_NAME_CHARS = 256

ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")


def parse_messages(fields: Fields) -> list[dict[str, str]]:
    """Messages with ``role``, ``content`` as one string, and ``name`` if given.

    Text parts of a message are joined by line breaks.

    Raises:
        RequestError: There are none, or one is invalid; the message has its path.
    """
    messages = fields.array("messages", MAX_MESSAGES)
    if not messages:
        raise RequestError("'messages' must be an array with at least one message", param="messages")
    return [_message(value, f"messages[{index}]") for index, value in enumerate(messages)]


def _message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RequestError(f"'{path}' must be an object with 'role' and 'content', got {shown(value)}", param=path)
    fields = Fields(value, path)
    role = fields.raw("role")
    if role in _TOOL_ROLES:
        raise RequestError(
            f"'{path}.role' is '{role}', and tools are not supported; use one of {', '.join(ROLES)}",
            param=f"{path}.role",
            code="unsupported_parameter",
        )
    if role not in ROLES:
        raise RequestError(f"'{path}.role' must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{path}.role")
    for unsupported in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        fields.reject(unsupported)
    message = {"role": role, "content": _content(fields)}
    if (name := fields.string("name", max_chars=MAX_NAME_CHARS)) is not None:
        message["name"] = name
    fields.finish()
    return message


def _content(fields: Fields) -> str:
    content, param = fields.raw("content"), fields.param("content")
    if isinstance(content, str):
        return checked_string(content, param, max_chars=MAX_TEXT_CHARS)
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{param}' must be a string, or an array of text parts, got {shown(content)}", param=param)
    parts = fields.array("content", MAX_PARTS) or []
    return "\n".join(_text(part, f"{param}[{index}]") for index, part in enumerate(parts))


def _text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{path}' must be an object with 'type' and 'text', got {shown(part)}", param=path)
    if part.get("type") != "text":
        raise RequestError(
            f"'{path}.type' must be 'text', got {shown(part.get('type'))}; pictures, audio and files are not supported",
            param=f"{path}.type",
        )
    fields = Fields(part, path)
    fields.ignore("type")
    text = checked_string(fields.raw("text"), f"{path}.text", max_chars=MAX_TEXT_CHARS)
    fields.finish()
    return text
