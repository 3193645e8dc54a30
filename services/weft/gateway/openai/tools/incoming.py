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

_NAME_MARKS = str.maketrans(dict.fromkeys("_-.:/", "a"))
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_OUTSIDE = {quotes: re.compile(f"[{quotes}{{}}()\\[\\]]") for quotes in ('"', "\"'")}
_INSIDE = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}


class IncomingText:
    """The text of an answer. What was taken from it can be given back, up to the last ``commit``."""

    def __init__(self) -> None:
        self._text = ""
        #: What was taken is between these; pieces are appended where nothing is before it.
        self._start = self._at = 0
        self._is_ended = False
        self._is_in_call = False

    def add(self, piece: str) -> None:
        """Append a piece."""
        self._text = self._text[self._start :] + piece
        self._start, self._at = 0, self._at - self._start

    def end(self) -> None:
        """No piece follows."""
        self._is_ended = True

    def commit(self) -> None:
        """Forget what was taken."""
        self._start = self._at

    def give_back(self, num_chars: int | None = None) -> None:
        """Return the last characters to the front; None: everything taken since ``commit``."""
        self._at = self._start if num_chars is None else self._at - num_chars

    def attempt(self, call: Parsing[None]) -> Parsing[None]:
        """Parse a call, or several. If it is not one, what was taken of it is content; a call that has begun stays."""
        try:
            yield from call
        except NotACallError:
            if not self._is_in_call and self._at > self._start:
                yield Content(self._text[self._start : self._at])
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
        num_chars = 0
        while (char := (yield from self.peek())) and is_name(char):
            self._at += 1
            num_chars += 1
        if not num_chars:
            raise NotACallError
        return self._text[self._at - num_chars : self._at]

    def content_until(self, *markers: str) -> Parsing[str]:
        """Take a marker, and yield the text before it as content; return the marker, or "" at the end."""
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - (0 if self._is_ended else self._num_begun(markers))
            if end > self._at:
                yield Content(self._text[self._at : end])
            self._at = end
            self.commit()
            if found:
                self._at = found.end()
                return found[0]
            if self._is_ended:
                return ""
            yield None

    def text_until(self, *markers: str) -> Parsing[tuple[str, str]]:
        """Take and return the text before a marker, and the marker. Raises NotACallError if none comes."""
        pattern, longest, num_searched = _any_of(markers), max(map(len, markers)), 0
        while not (found := pattern.search(self._text, self._at + num_searched)):
            if self._is_ended:
                self._at = len(self._text)
                raise NotACallError
            num_searched = max(0, len(self._text) - self._at - longest)
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
        quote, num_scanned = "", 0
        while True:
            pattern, scanned = _INSIDE[quote] if quote else _OUTSIDE[quotes], self._at + num_scanned
            found = pattern.search(self._text, scanned)
            if found is None:
                # Only an escape whose second character has not come is looked at again.
                scanned = max(scanned, len(self._text) - bool(quote and self._text.endswith("\\")))
                if is_streamed and scanned > self._at:
                    yield Arguments(self._text[self._at : scanned])
                    self._at = scanned
                    self.commit()
                num_scanned = scanned - self._at
                if self._is_ended:
                    self._at = len(self._text)
                    raise NotACallError
                yield None
                continue
            mark, scanned = found[0], found.end()
            num_scanned = scanned - self._at
            if quote:
                quote = "" if mark == quote else quote
            elif mark in quotes:
                quote = mark
            elif mark in _CLOSERS:
                closers.append(_CLOSERS[mark])
            elif not closers or closers.pop() != mark:
                if is_streamed and found.start() > self._at:
                    yield Arguments(self._text[self._at : found.start()])
                self._at = scanned
                raise NotACallError
            if not quote and not closers:
                text, self._at = self._text[self._at : scanned], scanned
                if is_streamed:
                    yield Arguments(text)
                return "" if is_streamed else text

    def _num_begun(self, markers: tuple[str, ...]) -> int:
        """Characters at the end that may begin a marker."""
        rest = self._text[max(self._at, len(self._text) - max(map(len, markers), default=0)) :]
        lengths = (num for marker in markers for num in range(1, len(marker)) if rest.endswith(marker[:num]))
        return max(lengths, default=0)


def is_name(text: str) -> bool:
    """Whether a function may have this name."""
    return text.translate(_NAME_MARKS).isalnum()


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")
