"""What the text of a choice consists of: reasoning, content and tool calls, as OpenAI's deltas."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from weft.gateway.openai.tools import harmony
from weft.gateway.openai.tools.formats import Schemas, ToolFormat, call_id, named_in
from weft.gateway.openai.tools.incoming import Arguments, CallStart, Content, IncomingText, Parsing, Reasoning

#: Fields that a delta of a message has.
Delta: TypeAlias = dict[str, Any]

#: Model parameter with the name of its marks of reasoning.
PARAMETER = "reasoning_parser"
CONTENT, REASONING, TOOL_CALLS = "content", "reasoning_content", "tool_calls"


class ReasoningMarks(NamedTuple):
    """What stands before and behind the reasoning of a model.

    Attributes:
        parse: Parses whole answers, of which reasoning may be any part; None: it comes first.
    """

    start: str
    end: str
    is_special: bool = False
    parse: Callable[[IncomingText, Schemas], Parsing[None]] | None = None


#: By name; a chat template that has the end of one shows it.
REASONING_MARKS: Mapping[str, ReasoningMarks | None] = {
    "none": None,
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]", is_special=True),
    "harmony": ReasoningMarks(harmony.ANALYSIS, harmony.ANALYSIS, is_special=True, parse=harmony.parse),
    "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
}


def reasoning_marks(model: str, named: str, template: str) -> ReasoningMarks | None:
    """The marks with the name that the model's parameter gives, "" for those which its chat template has.

    Raises InternalError: The parameter is wrong; clients are not told.
    """
    if not named:
        return next((marks for marks in REASONING_MARKS.values() if marks and marks.end in template), None)
    return named_in(REASONING_MARKS, named, model, PARAMETER)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers to a request may consist of.

    Attributes:
        marks: Of reasoning, if the model reasons.
        is_reasoning: Whether the prompt has opened the reasoning.
        shows_reasoning: Whether the client gets it.
        tools: How the model writes tool calls; None: it may not call any.
        opening: Text that the prompt ends with and that belongs to the answer: the start of a forced call.
    """

    marks: ReasoningMarks | None = None
    is_reasoning: bool = False
    shows_reasoning: bool = True
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    opening: str = ""
    is_parallel: bool = True


class AnswerReader:
    """Reads the text of one choice, in pieces of any length; the deltas together say the same for any pieces.

    Whitespace between reasoning, content and calls is left out. Markers are held back until it is known that they are
    some.

    Attributes:
        num_calls: Tool calls so far.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._text = IncomingText()
        self._text.add(form.opening)
        self._events = _parse(self._text, form)
        self._make_id = form.tools.make_id if form.tools is not None else call_id
        self._is_plain = form.marks is None and form.tools is None
        #: Whitespace that is sent only if text of the same kind follows; the kind of the last delta.
        self._spaces = ""
        self._kind = ""
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the last text was reasoning."""
        return self._kind == REASONING

    def read(self, piece: str) -> list[Delta]:
        """The deltas of the next piece."""
        self._text.add(piece)
        return list(self._deltas())

    def finish(self) -> list[Delta]:
        """The rest; no piece follows."""
        self._text.end()
        deltas = list(self._deltas())
        if self._spaces and self._kind in ("", CONTENT) and not self.num_calls:
            deltas.append({CONTENT: self._spaces})
        return deltas

    def _deltas(self) -> Iterator[Delta]:
        for event in self._events:
            if event is None:
                return
            if isinstance(event, Content | Reasoning):
                yield from self._texts(REASONING if isinstance(event, Reasoning) else CONTENT, event.text)
                continue
            is_start = isinstance(event, CallStart)
            self.num_calls += is_start
            self._spaces, self._kind = "", TOOL_CALLS
            if self.num_calls > 1 and not self._form.is_parallel:
                continue
            yield {TOOL_CALLS: [{"index": self.num_calls - 1, **self._call(event)}]}

    def _call(self, event: CallStart | Arguments) -> dict[str, Any]:
        if isinstance(event, Arguments):
            return {"function": {"arguments": event.text}}
        return {"id": self._make_id(), "type": "function", "function": {"name": event.name, "arguments": ""}}

    def _texts(self, kind: str, text: str) -> Iterator[Delta]:
        if self._is_plain:
            yield {kind: text}
            return
        if kind != self._kind:
            is_begin = not self._kind
            text, self._spaces = self._spaces + text, ""
            if not text.strip():
                self._spaces = text
                return
            if not (is_begin and kind == CONTENT) and self._kind != TOOL_CALLS:
                text = text.lstrip()
        else:
            text, self._spaces = self._spaces + text, ""
        if kind == REASONING:  # without the line break before its end
            self._spaces = text[len(text.rstrip()) :]
            text = text.rstrip()
        self._kind = kind
        if text and (kind == CONTENT or self._form.shows_reasoning):
            yield {kind: text}


def _parse(text: IncomingText, form: AnswerForm) -> Parsing[None]:
    if form.marks is not None and form.marks.parse is not None:
        yield from form.marks.parse(text, form.schemas)
        return
    if form.marks is not None:
        yield from _reasoning(text, form.marks, is_open=form.is_reasoning)
    if form.tools is not None:
        yield from form.tools.parse(text, form.schemas)
    else:
        yield from text.content_until()


def _reasoning(text: IncomingText, marks: ReasoningMarks, *, is_open: bool) -> Parsing[None]:
    """The reasoning that the answer begins with, if it does."""
    yield from text.spaces()
    if not ((yield from text.takes(marks.start)) or is_open):
        text.give_back()
        return
    text.commit()
    for event in text.content_until(marks.end):
        yield Reasoning(event.text) if isinstance(event, Content) else event
    text.commit()


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message that deltas make up."""
    texts: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name, value in delta.items():
            if name != TOOL_CALLS:
                texts.setdefault(name, []).append(value)
                continue
            (call,) = value
            if call["index"] == len(calls):
                calls.append({name: call[name] for name in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    content = "".join(texts.pop(CONTENT, ())) if CONTENT in texts or not (texts or calls) else None
    message = {"role": "assistant", CONTENT: content, "refusal": None}
    message |= {name: "".join(parts) for name, parts in texts.items()}
    return message | ({TOOL_CALLS: calls} if calls else {})
