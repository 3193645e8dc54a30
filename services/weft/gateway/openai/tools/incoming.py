"""``IncomingText``: text that arrives in pieces, and what parsers take from its front.

A parser is a generator that yields events, and None where it needs more text. So it is written as if the whole text
were there, and the pieces that the text comes in cannot change what it finds.
"""

import functools
import re
from collections.abc import Generator
from typing import NamedTuple, TypeAlias, TypeVar


class NotACallError(Exception):
    """The text that began like a tool call is not one."""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thinks."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; its arguments follow, until the next event of another kind."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments, which are JSON."""

    text: str


Event: TypeAlias = Content | Reasoning | CallStart | Arguments
Result = TypeVar("Result")
Parsing: TypeAlias = Generator[Event | None, None, Result]

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_OUTSIDE = {quotes: re.compile(f"[{quotes}{{}}()\\[\\]]") for quotes in ('"', "\"'")}
_INSIDE = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}


class IncomingText:
    """The text of an answer. What was taken from it can be given back, up to the last ``commit``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_ended = False
        self._is_in_call = False

    def add(self, piece: str) -> None:
        """Append a piece."""
        self._text += piece

    def end(self) -> None:
        """No piece follows."""
        self._is_ended = True

    def commit(self) -> None:
        """Forget what was taken."""
        self._text, self._at = self._text[self._at :], 0

    def give_back(self, num_chars: int | None = None) -> None:
        """Return the last characters to the front; None: everything taken since ``commit``."""
        self._at -= self._at if num_chars is None else num_chars

    def attempt(self, call: Parsing[None]) -> Parsing[None]:
        """Parse a call, or several. If it is not one, what was taken of it is content; a call that has begun stays."""
        try:
            yield from call
        except NotACallError:
            if not self._is_in_call and self._at:
                yield Content(self._text[: self._at])
        self._is_in_call = False
        self.commit()

    def begin_call(self, name: str) -> Parsing[None]:
        """Announce a call, which cannot be taken back."""
        self._is_in_call = True
        self.commit()
        yield CallStart(name)

    def end_call(self) -> None:
        """The call is complete; what follows may be another one, or content."""
        self._is_in_call = False
        self.commit()

    def peek(self) -> Parsing[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield None
        return self._text[self._at]

    def takes(self, literal: str) -> Parsing[bool]:
        """Take ``literal``, if it is next."""
        while True:
            start = self._text[self._at : self._at + len(literal)]
            if start == literal:
                self._at += len(literal)
                return True
            if self._is_ended or not literal.startswith(start):
                return False
            yield None

    def expect(self, literal: str) -> Parsing[None]:
        """Take ``literal``. Raises NotACallError if it is not next."""
        if not (yield from self.takes(literal)):
            raise NotACallError

    def spaces(self) -> Parsing[None]:
        """Take whitespace."""
        while (char := (yield from self.peek())) and char.isspace():
            self._at += 1

    def function_name(self) -> Parsing[str]:
        """Take the name of a function. Raises NotACallError if there is none."""
        start = self._at
        while (char := (yield from self.peek())) and (char.isalnum() or char in "_-.:/"):
            self._at += 1
        if start == self._at:
            raise NotACallError
        return self._text[start : self._at]

    def content_until(self, *markers: str) -> Parsing[str]:
        """Take a marker, and yield the text before it as content; return the marker, or "" at the end."""
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self._text)
            end = found.start() if found else len(self._text) - (0 if self._is_ended else _begun(self._text, markers))
            if end:
                yield Content(self._text[:end])
                self._at = end
                self.commit()
            if found:
                self._at = len(found[0])
                return found[0]
            if self._is_ended:
                return ""
            yield None

    def text_until(self, *markers: str) -> Parsing[tuple[str, str]]:
        """Take and return the text before a marker, and the marker. Raises NotACallError if none comes."""
        pattern, longest, start = _any_of(markers), max(map(len, markers)), self._at
        while not (found := pattern.search(self._text, start)):
            if self._is_ended:
                self._at = len(self._text)
                raise NotACallError
            start = max(self._at, len(self._text) - longest)
            yield None
        text, self._at = self._text[self._at : found.start()], found.end()
        return text, found[0]

    def enclosed(self, *, quotes: str = '"', is_streamed: bool = False) -> Parsing[str]:
        """Take the string in quotes, or what is enclosed by brackets, that is next; return it.

        If ``is_streamed``, it is yielded as arguments as it arrives, and "" is returned.
        Raises NotACallError: something else is next, it does not end, or brackets do not match.
        """
        if (yield from self.peek()) not in (*_CLOSERS, *quotes):
            raise NotACallError
        closers: list[str] = []
        quote, scanned = "", self._at
        while True:
            pattern = _INSIDE[quote] if quote else _OUTSIDE[quotes]
            found = pattern.search(self._text, scanned)
            if found is None:
                # Only an escape whose second character has not come is looked at again.
                scanned = max(scanned, len(self._text) - bool(quote and self._text.endswith("\\")))
                if is_streamed and scanned > self._at:
                    yield Arguments(self._text[self._at : scanned])
                    self._at = scanned
                    self.commit()
                    scanned = 0
                if self._is_ended:
                    self._at = len(self._text)
                    raise NotACallError
                yield None
                continue
            mark, scanned = found[0], found.end()
            if quote:
                quote = "" if mark == quote else quote
            elif mark in quotes:
                quote = mark
            elif mark in _CLOSERS:
                closers.append(_CLOSERS[mark])
            elif not closers or closers.pop() != mark:
                self._at = scanned
                raise NotACallError
            if not quote and not closers:
                text, self._at = self._text[self._at : scanned], scanned
                if is_streamed:
                    yield Arguments(text)
                return "" if is_streamed else text


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")


def _begun(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end of ``text`` that may begin a marker."""
    lengths = (num for marker in markers for num in range(1, len(marker)) if text.endswith(marker[:num]))
    return max(lengths, default=0)
