"""From prompts to pieces: one call of the model for each prompt, their answers in one order of arrival."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_common.cancellation import cancel_and_wait
from weft_common.client.v2_client import Metadata, V2Client
from weft_common.errors import InvalidArgumentError
from weft_gateway.openai.ask import Ask, Prompt
from weft_gateway.openai.pieces import AnswerLogprobs, Piece, PieceReader, unfit_answer
from weft_gateway.openai.text_model import TextModel

#: Pieces of several prompts that may wait for the client.
_MAX_WAITING = 16


async def generate(
    router: V2Client,
    model: TextModel,
    ask: Ask,
    prompts: Sequence[Prompt],
    *,
    request_id: str,
    metadata: Metadata,
    timeout_s: float,
) -> AsyncGenerator[Piece, None]:
    """The pieces of every prompt as they come; the choices of prompt ``i`` begin at ``i * ask.num_choices``.

    All prompts are worked on at once. The first that fails ends all. Closing the iterator cancels what is in work.

    Raises:
        RequestError: The model does not take what the request has.
        RemoteError: As ``V2Client.stream``.
        InternalError: As ``PieceReader.read``.
    """
    ids = [request_id, *(f"{request_id}-{index}" for index in range(1, len(prompts)))]
    requests = [model.request(ask, prompt, one) for prompt, one in zip(prompts, ids, strict=True)]

    async def answers(index: int) -> AsyncGenerator[Piece, None]:
        reader, first = PieceReader(ask.num_choices), index * ask.num_choices
        stream = router.stream(requests[index], timeout_s=timeout_s, metadata=metadata)
        try:
            async with contextlib.aclosing(stream) as results:
                async for result in results:
                    for piece in reader.read(result):
                        yield piece._replace(choice=first + piece.choice)
        except InvalidArgumentError as error:  # it cannot be read
            raise unfit_answer(model.name) from error

    sources = [answers(index) for index in range(len(requests))]
    async with contextlib.aclosing(sources[0] if len(sources) == 1 else merged(sources)) as pieces:
        async for piece in pieces:
            yield piece


async def merged(sources: Iterable[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """What the sources give, as it comes; the first that fails ends all. Closing the iterator closes them."""
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_MAX_WAITING)

    async def follow(source: AsyncGenerator[Piece, None]) -> None:
        """Every piece is handed on, then None, or what the source failed with."""
        end: Exception | None = None
        try:
            async with contextlib.aclosing(source):
                async for piece in source:
                    await arrived.put(piece)
                    await asyncio.sleep(0)  # one that is always ready would fill the queue before the others get in
        except Exception as error:
            end = error
        await arrived.put(end)

    following = [asyncio.create_task(follow(source)) for source in sources]
    num_open = len(following)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await cancel_and_wait(following)


@dataclass(slots=True)
class Usage:
    """Tokens of a request so far.

    Attributes:
        num_choices: Answers to each prompt.
        num_input_tokens: Of each prompt, by its index, each counted once; a prompt is missing as long as it is unknown.
        num_cached_tokens: As many of these the model had kept, likewise.
        num_output_tokens: Of all choices.
        is_known: Whether the model tells.
    """

    num_choices: int
    num_input_tokens: dict[int, int] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    is_known: bool = False

    def add(self, piece: Piece) -> None:
        """A piece has come."""
        if piece.num_input_tokens is not None:
            self.num_input_tokens[piece.choice // self.num_choices] = piece.num_input_tokens
        if piece.num_cached_tokens is not None:
            self.num_cached_tokens[piece.choice // self.num_choices] = piece.num_cached_tokens
        if piece.num_output_tokens is not None:
            self.is_known = True
            self.num_output_tokens += piece.num_output_tokens

    def as_json(self) -> dict[str, Any] | None:
        """OpenAI's object; None: the model does not tell."""
        if not self.is_known:
            return None
        num_input_tokens = sum(self.num_input_tokens.values())
        usage: dict[str, Any] = {
            "prompt_tokens": num_input_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_input_tokens + self.num_output_tokens,
        }
        if self.num_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self.num_cached_tokens.values())}
        return usage


@dataclass(slots=True)
class CollectedChoice:
    """A choice that is gathered from its pieces.

    Attributes:
        texts: In order.
        logprobs: Of all its tokens; None: the model gave none.
        finish_reason: As the last piece said it.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[AnswerLogprobs] | None = None
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """A piece has come."""
        self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        self.finish_reason = piece.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        """So far."""
        return "".join(self.texts)


async def gather(pieces: AsyncGenerator[Piece, None], num_choices: int, usage: Usage) -> list[CollectedChoice]:
    """Every choice as a whole; ``usage`` is told of each piece. Raises what ``pieces`` raises, which is closed."""
    choices = [CollectedChoice() for _ in range(num_choices)]
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            usage.add(piece)
            choices[piece.choice].add(piece)
    return choices
