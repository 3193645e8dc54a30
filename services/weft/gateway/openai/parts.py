"""An answer as a list of parts - reasoning, texts and calls - for interfaces that write it so."""

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from starlette.types import ASGIApp
from typing_extensions import override

from weft.gateway.openai import chat
from weft.gateway.openai.answer import CONTENT, TOOL_CALLS, AnswerForm, AnswerReader, Delta
from weft.gateway.openai.chat import ChatRequest
from weft.gateway.openai.endpoint import EndpointCall
from weft.gateway.openai.generate import ChoiceDelta, TokenLogprobs, Usage
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.writing import AnswerWriter, Event, respond


@dataclass(slots=True)
class Part:
    """A part of an answer.

    Attributes:
        index: Its place in the answer.
        kind: ``CONTENT``, ``REASONING`` or ``TOOL_CALLS``.
        text: So far; of a call its arguments.
        call_id, name: Of a call.
        logprobs: Of the tokens of a text, if asked for.
        is_cut: The answer was ended in it by its length.
    """

    index: int
    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_cut: bool = False


class PartWriter(AnswerWriter):
    """One choice in parts; a whole answer is what is left at the end of a stream.

    Attributes:
        num_reasoning_tokens: Tokens of these that were reasoning and its marks, by steps of the model.
        finish_reason, stop_reason: Why the answer ended, as of ``ChoiceDelta``; None while it has not.
    """

    id_prefix: ClassVar[str]
    has_names: ClassVar[bool] = True

    def __init__(self, request: ChatRequest, form: AnswerForm) -> None:
        super().__init__(self.id_prefix)
        self.request = request
        self.parts: list[Part] = []
        self.usage = Usage(1)
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self._reader = AnswerReader(form)
        self._has_begun = self._is_open = False
        #: Tokens behind the last text or call.
        self._num_untold = 0
        #: Of tokens whose text has not come out of the reader.
        self._logprobs: list[TokenLogprobs] = []

    @abstractmethod
    def begin(self) -> Iterable[Event]:
        """The events before the first part."""

    @abstractmethod
    def begin_part(self, part: Part) -> Iterable[Event]:
        """The events of a new part, which has no text yet."""

    @abstractmethod
    def add(self, part: Part, text: str, logprobs: Sequence[TokenLogprobs]) -> Iterable[Event]:
        """The events of more text."""

    @abstractmethod
    def end_part(self, part: Part) -> Iterable[Event]:
        """The events of a part that is complete, or cut."""

    @abstractmethod
    def end_answer(self) -> Iterable[Event]:
        """The events behind the last part."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The whole answer, when it has ended."""

    @override
    async def body(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> dict[str, Any]:
        async with contextlib.aclosing(self.events(deltas)) as events:
            async for _ in events:
                pass
        return self.answer()

    @override
    async def events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                for event in self._read(delta):
                    yield event
        for event in self._finish():
            yield event

    def open_part(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Event]:
        """End the last part and begin another."""
        yield from self.close_part()
        self.parts.append(Part(len(self.parts), kind, "", call_id, name))
        self._is_open = True
        yield from self.begin_part(self.parts[-1])

    def close_part(self) -> Iterator[Event]:
        """End the last part, if it has not ended."""
        if self._is_open:
            self._is_open = False
            yield from self.end_part(self.parts[-1])

    def _read(self, delta: ChoiceDelta) -> Iterator[Event]:
        self.usage.add(delta)
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()
        deltas = self._reader.read(delta.text)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason or self.stop_reason
        self._num_untold += delta.num_output_tokens or 0
        if self._reader.is_reasoning:
            self.num_reasoning_tokens += self._num_untold
            self._logprobs = []
        else:
            self._logprobs += delta.logprobs or ()
        if deltas or self._reader.is_reasoning:
            self._num_untold = 0
        for each in deltas:
            yield from self._add(each)

    def _finish(self) -> Iterator[Event]:
        if not self._has_begun:
            yield from self.begin()
        for each in self._reader.finish():
            yield from self._add(each)
        if self._is_open:
            self.parts[-1].is_cut = self.finish_reason == "length"
        yield from self.close_part()
        yield from self.end_answer()

    def _add(self, delta: Delta) -> Iterator[Event]:
        ((kind, value),) = delta.items()
        if kind == TOOL_CALLS:
            self._logprobs = []
            call = value[0]
            if "id" in call:
                yield from self.open_part(kind, call_id=call["id"], name=call["function"]["name"])
            text = call["function"]["arguments"]
        else:
            text = value
            if not self._is_open or self.parts[-1].kind != kind:
                yield from self.open_part(kind)
        logprobs, self._logprobs = (self._logprobs, []) if kind == CONTENT else ((), self._logprobs)
        part = self.parts[-1]
        if text:
            part.text += text
            part.logprobs += logprobs
            yield from self.add(part, text, logprobs)


async def part_response(
    request: ChatRequest,
    model: TextModel,
    call: EndpointCall,
    *,
    writer: Callable[[ChatRequest, AnswerForm], PartWriter],
) -> ASGIApp:
    """The answer to a chat in parts. Raises RequestError or InternalError."""
    common, form = await chat.prepare(request, model)
    # Which tokens belong to the reasoning or the text can only be told of a stream.
    is_stream = common.is_stream or form.marks is not None or "logprobs" in common.sampling
    asked = replace(common, is_stream=is_stream)
    return await respond(call, model, asked, writer(request, form), is_stream=common.is_stream)
