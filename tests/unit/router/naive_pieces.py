"""What a collector makes of the responses of a stream, by the description of the language alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.unit.router.naive_values import Rows, Values
from tests.unit.router.random_graphs import Node

CLOSING = "\"')]\u201d\u2019\u00bb"


@dataclass
class BrokenError(Exception):
    """The collector fails; what it gave before."""

    code: str
    pieces: list[Values]


def pieces_of(node: Node, responses: Sequence[Values], *, is_over: bool) -> list[Values]:
    """The pieces of these responses, with the rest if the stream is over. Raises BrokenError."""
    limit = node.max_bytes or 1 << 20
    pieces: list[Values] = []
    text, has_text = "", False  # whose sentences are taken
    since: list[Values] = []  # responses that are in no piece yet

    def end(sentence: str) -> None:
        piece = dict(latest)
        for name in node.joins:
            piece[name] = whole(since, name, response)
        if node.piece == "SENTENCE" and has_text:
            piece["TEXT"] = [sentence.encode()]
        pieces.append(piece)
        since.clear()

    latest: Values = {}
    response: Values = {}
    for response in responses:
        since.append(response)
        latest = {name: last(since, name) for one in since for name in one}
        counted = [name for name in node.joins if node.piece != "SENTENCE" or name != "TEXT"]
        rows = response.get("TEXT")
        if node.piece == "SENTENCE" and rows is not None:
            if len(rows) > 1:
                raise BrokenError("INTERNAL", pieces)
            text, has_text = text + rows[0].decode(), True
            while sentence := first_sentence(text, limit):
                text = text[len(sentence) :]
                end(sentence)
        num_bytes = sum(num_bytes_of(one.get(name), name) for one in since for name in counted)
        if node.piece == "WHOLE" and num_bytes > limit:
            raise BrokenError("RESOURCE_EXHAUSTED", pieces)
        is_full = node.piece != "WHOLE" and num_bytes >= limit
        if is_full or (node.count and len(since) >= node.count):
            end(text)
            text = ""
    if is_over and (since or text):
        end(text)
    return pieces


def last(responses: Sequence[Values], name: str) -> Rows:
    """The last value of a tensor; None if none of the responses has it."""
    return next((one[name] for one in reversed(responses) if one.get(name) is not None), None)


def whole(responses: Sequence[Values], name: str, latest: Values) -> Rows:
    """The values of a tensor one behind the other; empty ones in a further piece of one response."""
    parts = [rows for one in responses if (rows := one.get(name)) is not None]
    if not parts:
        given = latest.get(name)
        return None if given is None else [b""] * len(given)
    return [b"".join(rows) for rows in zip(*parts, strict=True)]


def num_bytes_of(rows: Rows, name: str) -> int:
    """Of a tensor, as the protocol counts: each string with the four bytes of its length."""
    return sum(len(row) + 4 * (name == "TEXT") for row in rows or [])


def first_sentence(text: str, limit: int) -> str:
    """The first sentence, cut at so many bytes; "" if none has ended."""
    end = next((end for end in range(1, len(text) + 1) if ends_sentence(text[:end])), 0)
    sentence = text[: end or len(text)]
    if len(sentence.encode()) <= limit:
        return text[:end]
    return max((cut for cut in prefixes(sentence) if len(cut.encode()) <= limit), key=len)


def ends_sentence(text: str) -> bool:
    """Whether a sentence ends at the end of a text, which is not blank."""
    if not text.strip():
        return False
    if text[-1] in "\n\u3002\uff01\uff1f":
        return True
    marks = [
        text[:-1][: len(text) - 1 - num] for num in range(4) if set(text[:-1][len(text) - 1 - num :]) <= set(CLOSING)
    ]
    return text[-1] in " \t\r\f\v" and any(mark[-1:] in (".", "!", "?") for mark in marks if mark)


def prefixes(text: str) -> Iterator[str]:
    """A text cut behind each of its characters."""
    return (text[:end] for end in range(1, len(text) + 1))
