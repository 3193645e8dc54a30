"""``Target``, the interface between the graph executor and the servers that answer steps."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError
from weft.base.signature import ModelSignature
from weft.router import DEFAULT_RETRY_PERCENT

if TYPE_CHECKING:
    from weft_protos.model_config_pb2 import ModelConfig

#: Why a model that is being loaded is not ready.
LOADING = "it is loading"
#: Most repeats that are saved: so many calls may be repeated at once, as when a replica dies with its calls.
MAX_RETRY_TOKENS = 100.0


class TargetModel(NamedTuple):
    """One model that a target serves.

    Attributes:
        is_ready: False while it is loaded but cannot answer.
        config: The full configuration; None if the target has none.
        reason: Why it is not ready, from the target; "" if unknown.
        not_ready_since: When that was seen, as ISO time; "" while it is ready.
        is_described: False if the target only lists it, as while it loads: the signature has its name, and its version
            if known.
    """

    signature: ModelSignature
    is_ready: bool
    config: "ModelConfig | None" = None
    reason: str = ""
    not_ready_since: str = ""
    is_described: bool = True

    @classmethod
    def undescribed(cls, name: str, version: str, state: str, reason: str) -> "TargetModel":
        """A model that the target lists as not ready; ``state`` and ``reason`` are from its index."""
        signature = ModelSignature(name, version, "", 0, (), ())
        return cls(signature, False, reason=reason or (LOADING if state == "LOADING" else ""), is_described=False)


def is_to_come(state: str, reason: str) -> bool:
    """Whether a model's index state means that it is not ready but was not unloaded on purpose."""
    return state in ("LOADING", "UNLOADING") or (state == "UNAVAILABLE" and reason != "unloaded")


class Target(Protocol):
    """Answers inference calls over some transport.

    Attributes:
        name: As given to the router, for example ``model``.
        address: For errors and spans, for example ``127.0.0.1:8021``.
    """

    name: str
    address: str

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Make one call, with the deadline, headers and trace context of ``context``.

        Raises:
            RemoteError: The other side answered with an error, or could not be reached (UNAVAILABLE).
            DeadlineExceededError: The deadline had passed before the call was made.

        Cancelling the awaiting task cancels the call on the other side.
        """

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield the responses of a decoupled model as they come; only the last ``is_final``.

        Responses are read on demand, so a slow caller slows the model down. The deadline covers the whole stream.

        Raises:
            WeftError: As ``infer``, also after some responses.

        Closing the generator, or cancelling the task that awaits it, cancels the call on the other side.
        """

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """List the models of the other side, by ``RepositoryIndex``, and ``ModelConfig`` or ``ModelMetadata``.

        Raises RemoteError: the other side does not answer within ``timeout_s``.
        """

    async def close(self) -> None:
        """Close the transport; calls in flight are cancelled."""


def named(target: Target, call: InferCall) -> str:
    """Model and target of a call, for messages."""
    version = f" version {call.model_version}" if call.model_version else ""
    return f"model '{call.model_name}'{version} on target '{target.name}' ({target.address})"


def too_late(where: str, left_s: float) -> DeadlineExceededError:
    """The error for a call whose deadline had passed before it was made; ``left_s`` is at most 0."""
    return DeadlineExceededError(f"the deadline passed {-left_s * 1e3:.1f} ms before {where} was called")


class RetryBudget:
    """A token bucket for repeated calls: each call earns a fraction of a token, each repeat costs one.

    Retries and hedges of graphs, and calls moved from a replica that had not begun them, are repeats and earn nothing.

    Args:
        percent: Percentage of calls that may be repeated in the long run, unless the call brings its own; with 0 the
            bucket also starts empty.
        max_tokens: Most tokens; the bucket starts full.

    Attributes:
        num_refused: Repeats that found no token.
    """

    def __init__(self, percent: float = DEFAULT_RETRY_PERCENT, *, max_tokens: float = MAX_RETRY_TOKENS) -> None:
        self._percent = percent
        self._max_tokens = max_tokens
        self._tokens = max_tokens if percent else 0.0
        self.num_refused = 0

    def earn(self, percent: float = 0.0) -> None:
        """Count a first call; ``percent`` is its own percentage, 0 the router's."""
        if self._tokens < self._max_tokens:
            self._tokens = min(self._tokens + (percent or self._percent) / 100, self._max_tokens)

    def take(self) -> bool:
        """Take a token for a repeat; False if there is none."""
        # Sums of hundredths fall short of 1 by rounding.
        if self._tokens < 1 - 1e-9:
            self.num_refused += 1
            return False
        self._tokens = max(self._tokens - 1, 0.0)
        return True
