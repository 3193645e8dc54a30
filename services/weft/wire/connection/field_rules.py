"""Checks that header fields of requests, responses and trailers are well-formed (RFC 9113, section 8)."""

from collections.abc import Sequence

Fields = Sequence[tuple[str, str]]

_CONNECTION_SPECIFIC = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
_REQUEST_PSEUDO = frozenset({":method", ":scheme", ":path", ":authority"})
_NAME_CHARS = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
#: Names that were found to be right: calls repeat them, with values that differ.
_known_names: set[str] = set()
_MAX_KNOWN_NAMES = 1024
_MAX_KNOWN_NAME_CHARS = 64


def request_fault(fields: Fields) -> str:
    """Return why request fields are malformed, "" if they are valid."""
    seen: dict[str, str] = {}
    for name, value in fields:
        if name not in _REQUEST_PSEUDO:
            if name.startswith(":"):
                return f"pseudo-header {name!r} is no part of a request"
            break
        if name in seen:
            return f"pseudo-header {name} is there twice"
        seen[name] = value
    if seen.get(":method") == "CONNECT":
        return "" if ":authority" in seen and len(seen) == 2 else "a CONNECT request has :method and :authority alone"
    for name in (":method", ":scheme", ":path"):
        if not seen.get(name):
            return f"pseudo-header {name} is missing or empty"
    return _regular_fault(fields, len(seen))


def response_fault(fields: Fields) -> str:
    """Return why response fields are malformed, "" if they are valid."""
    names = [name for name, _ in _pseudo(fields)]
    if names != [":status"]:
        return f"a response has :status as its one pseudo-header, this one has {names}"
    status = fields[0][1]
    if len(status) != 3 or not status.isdecimal():
        return f":status {status!r} is no number of three digits"
    return _regular_fault(fields, 1)


def trailer_fault(fields: Fields) -> str:
    """Return why trailers are malformed, "" if they are valid."""
    return _regular_fault(fields, 0)


def content_length(fields: Fields) -> int:
    """Return the announced content length; -1 if absent, -2 if malformed or contradictory."""
    values = {value for name, value in fields if name == "content-length"}
    if not values:
        return -1
    value = values.pop()
    return int(value) if not values and value.isdecimal() and value.isascii() and len(value) < 19 else -2


def _pseudo(fields: Fields) -> list[tuple[str, str]]:
    """Pseudo-header fields: those before the first field whose name does not begin with a colon."""
    for index, (name, _) in enumerate(fields):
        if not name.startswith(":"):
            return list(fields[:index])
    return list(fields)


def _regular_fault(fields: Fields, start: int) -> str:
    has_length = False
    for name, value in fields[start:]:
        if name not in _known_names and (fault := _name_fault(name)):
            return fault
        # These would end a field in HTTP/1.1. White space at an end, which section 8.2.1 forbids too, is sent by
        # clients of gRPC, whose mapping to HTTP/2 lets a server strip it.
        if "\n" in value or "\r" in value or "\0" in value:
            return f"the value of field {name!r} has a line break or a zero byte"
        if name == "te":
            if value != "trailers":
                return f"field te is {value!r}; it may only be 'trailers'"
        elif name == "content-length":
            has_length = True
    if has_length and content_length(fields) == -2:
        return "content-length is no number, or there are two"
    return ""


def _name_fault(name: str) -> str:
    if name.startswith(":"):
        return f"pseudo-header {name!r} comes after a regular field or in trailers"
    if not name or not _NAME_CHARS.issuperset(name):
        return f"field name {name!r} has characters other than lower-case letters, digits and -_."
    if name in _CONNECTION_SPECIFIC:
        return f"field {name!r} belongs to HTTP/1.1"
    if len(name) <= _MAX_KNOWN_NAME_CHARS:
        if len(_known_names) >= _MAX_KNOWN_NAMES:
            _known_names.clear()
        _known_names.add(name)
    return ""
