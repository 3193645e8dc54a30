"""The one interface between the graph executor and whatever answers a step."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.signature import ModelSignature

if TYPE_CHECKING:
    from weft_protos.model_config_pb2 import ModelConfig

#: Why a model that is being loaded is not ready.
LOADING = "it is loading"
#: Of the calls, where neither the graph nor the command line says another share.
DEFAULT_RETRY_PERCENT = 20.0
#: Most repeats that are saved: so many calls may be repeated at once, as when a replica dies with its calls.
MAX_RETRY_TOKENS = 100.0


class TargetModel(NamedTuple):
    """One model that a target serves.

    Attributes:
        is_ready: False while it is loaded but cannot answer.
        reason: Why it is not ready, as the target says; "" if it does not.
        not_ready_since: When that was seen, as ISO time; "" while it is ready.
        is_described: False where the target lists it and tells no more, as while it loads: the signature has its name,
            and its version unless that is unknown too.
    """

    signature: ModelSignature
    is_ready: bool
    config: "ModelConfig | None" = None
    reason: str = ""
    not_ready_since: str = ""
    is_described: bool = True

    @classmethod
    def undescribed(cls, name: str, version: str, state: str, reason: str) -> "TargetModel":
        """A model that the target lists as not ready; ``state`` and ``reason`` are those of the index."""
        signature = ModelSignature(name, version, "", 0, (), ())
        return cls(signature, False, reason=reason or (LOADING if state == "LOADING" else ""), is_described=False)


def is_to_come(state: str, reason: str) -> bool:
    """Whether the state of a model in an index says that it is not ready, but was not unloaded on purpose."""
    return state in ("LOADING", "UNLOADING") or (state == "UNAVAILABLE" and reason != "unloaded")


class Target(Protocol):
    """Answers inference calls over a transport that nothing above it knows.

    Attributes:
        name: As given to the router, for example ``model``.
        address: For errors and spans, for example ``127.0.0.1:8021``.
    """

    name: str
    address: str

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """One call. The deadline, the headers and the trace context of ``context`` travel with it.

        Raises:
            DeadlineExceededError: The deadline had passed before the call was made.

        Cancelling the awaiting task cancels the call on the other side.
        """

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a decoupled model as they come; the last, and no other, ``is_final``.

        A response is read when the caller takes it, so that a slow caller slows the model down. The
        deadline holds for the whole stream.

        Closing the generator, or cancelling the task that awaits it, cancels the call on the other side.
        """

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """Every model the other side lists, by ``RepositoryIndex``, and ``ModelConfig`` or ``ModelMetadata``."""

    async def close(self) -> None:
        """Close the transport; calls in flight are cancelled."""


class RetryBudget:
    """A token bucket: each call earns a part of a token, each repeat of one, by whoever, costs a whole one.

    Retries and hedges of graphs and calls that a replica had not begun are repeats; they earn nothing themselves.

    Args:
        percent: Of a hundred calls so many may be repeated in the long run, where the call does not say it; with 0
            there is nothing in the bucket at first either.
        max_tokens: Most that are saved; as many are there at first.

    Attributes:
        num_refused: Repeats that there was no token for.
    """

    def __init__(self, percent: float = DEFAULT_RETRY_PERCENT, *, max_tokens: float = MAX_RETRY_TOKENS) -> None:
        self._percent = percent
        self._max_tokens = max_tokens
        self._tokens = max_tokens if percent else 0.0
        self.num_refused = 0

    def earn(self, percent: float = 0.0) -> None:
        """A call is made for the first time; ``percent`` is its own share, 0 the router's."""
        if self._tokens < self._max_tokens:
            self._tokens = min(self._tokens + (percent or self._percent) / 100, self._max_tokens)

    def take(self) -> bool:
        """Whether one more call may be repeated, which costs a token."""
        # Sums of hundredths fall short of 1 by rounding.
        if self._tokens < 1 - 1e-9:
            self.num_refused += 1
            return False
        self._tokens = max(self._tokens - 1, 0.0)
        return True
