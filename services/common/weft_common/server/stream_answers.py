"""The answers of one ``ModelStreamInfer`` on their way out: whose turn it is, and how many may wait."""

import asyncio

from opentelemetry.trace import Span

from weft_common.core import CallContext
from weft_common.errors import WeftError
from weft_protos import grpc_service_pb2 as pb

#: Answers of one stream that are ready and not yet taken by gRPC; beyond it the requests of the stream wait.
MAX_STREAM_ANSWERS = 16


class StreamCall:
    """One request of a stream.

    Attributes:
        turn: Done when the requests before it are answered, or are of decoupled models.
        is_passed: Done when that holds for this one too; the turn of the next.
    """

    __slots__ = ("context", "is_in_line", "is_passed", "request", "span", "turn")

    def __init__(
        self, request: pb.ModelInferRequest, context: CallContext, span: Span, turn: "asyncio.Future[None]"
    ) -> None:
        self.request = request
        self.context = context
        self.span = span
        self.turn = turn
        self.is_in_line = True
        self.is_passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave_line(self) -> None:
        """The next request need not wait for this one any more, and this one for no other."""
        if self.is_in_line:
            self.is_in_line = False
            self.turn.add_done_callback(lambda _: self.is_passed.set_result(None))


class Outgoing:
    """Answers on their way out; no more than ``MAX_STREAM_ANSWERS`` wait here for the client to read.

    Attributes:
        failure: What the stream ends with, once all is sent.
    """

    def __init__(self) -> None:
        self.failure: WeftError | None = None
        self._answers: asyncio.Queue[tuple[StreamCall, pb.ModelStreamInferResponse | WeftError, bool] | None]
        self._answers = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_STREAM_ANSWERS)

    async def put(
        self, stream_call: StreamCall, answer: pb.ModelStreamInferResponse | WeftError, *, is_final: bool
    ) -> None:
        """The answer is on its way, in its turn; ``is_final``: no other to its request follows."""
        if stream_call.is_in_line:
            await asyncio.shield(stream_call.turn)
        await self._room.acquire()
        self._answers.put_nowait((stream_call, answer, is_final))

    def end(self, failure: WeftError | None) -> None:
        """Nothing more comes."""
        self.failure = failure
        self._answers.put_nowait(None)

    async def get(self) -> tuple[StreamCall, pb.ModelStreamInferResponse | WeftError, bool] | None:
        """The next answer as it was put; None at the end."""
        item = await self._answers.get()
        self._room.release()
        return item
