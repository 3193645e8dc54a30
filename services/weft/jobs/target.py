"""The graph or model that a job runs, and the error handling of its requests."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.core import InferCall, Parameters, RequestedOutput
from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.base.signature import ModelSignature, answering_part
from weft.base.tensors import Array, WireTensor, decode
from weft.v2.client.v2_client import V2Client

_DESCRIBE_TIMEOUT_S = 30.0
#: Errors that another try may not meet.
_MAY_PASS = frozenset({"DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "ABORTED"})
#: Errors that say nothing of the request.
BUSY = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"})
#: Errors that every row would meet.
_FATAL = frozenset({"NOT_FOUND", "UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED"})
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 2.0
#: Of a request whose error may pass.
_NUM_TRIES = 3


class Identity(NamedTuple):
    """Identity of a graph or model, from its server.

    The digest is the sha256 of its configuration. A Weft router includes in it the graph's files and everything that it
    calls, a model's server the files of its version.
    """

    signature: ModelSignature
    digest: str


class RowsFailed(Exception):  # noqa: N818  # caught within this package
    """A request failed because of its content; has the path through the graph until the failure."""

    def __init__(self, error: WeftError, path: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.path = path


class JobTarget:
    """Sends the requests of a job.

    Args:
        version: "": the latest; fixed by ``identify``.
        outputs: Those to ask for; none: all.
        patience_s: How long the server may be busy or away, with no request answered, before the job ends.
        waits_for_model: Treat a graph that is gone, or a rejected key, like a server that is away.
    """

    def __init__(
        self,
        client: V2Client,
        name: str,
        version: str = "",
        *,
        parameters: Parameters | None = None,
        outputs: Sequence[str] = (),
        timeout_s: float = 60.0,
        patience_s: float = 120.0,
        waits_for_model: bool = False,
        clock_s: Callable[[], float],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._name = name
        self._version = version
        self._parameters = dict(parameters or {})
        self._outputs = tuple(RequestedOutput(output, {}) for output in outputs)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        # A router that starts does not know a graph before all of its models are there.
        self._busy = BUSY | (_FATAL if waits_for_model else {"NOT_FOUND"})
        self._clock_s = clock_s
        self._sleep = sleep
        self._last_answer_s = clock_s()

    async def identify(self) -> Identity:
        """Identify the graph or model, and fix its version.

        Raises:
            RemoteError: The server does not answer, or has no such model.
            InvalidArgumentError: It is decoupled and gives no single answer, or keeps state between requests.
        """
        config = await self._client.config(self._name, self._version, timeout_s=_DESCRIBE_TIMEOUT_S)
        metadata = await self._client.model_metadata(self._name, self._version, timeout_s=_DESCRIBE_TIMEOUT_S)
        if not self._version:
            # The default version, which is the highest; a new one that appears in mid job is not used.
            self._version = max(metadata.versions, key=int, default="")
        signature = ModelSignature.from_config(config, self._version)
        if signature.is_decoupled and not signature.can_collect:
            raise InvalidArgumentError(f"'{self._name}' gives any number of responses to a request; a job needs one")
        if signature.is_stateful:
            raise InvalidArgumentError(f"'{self._name}' keeps state between requests; rows of a job have no order")
        return Identity(signature, hashlib.sha256(answering_part(config)).hexdigest())

    async def is_still(self, digest: str) -> bool:
        """Whether its digest is unchanged; waits while the server is away, or does not know it yet.

        Raises:
            RemoteError: It was away for longer than ``patience_s``.
            InvalidArgumentError: As ``identify``.
        """
        start_s, delay_s = self._clock_s(), _FIRST_DELAY_S
        while True:
            try:
                identity = await self.identify()
            except RemoteError as error:
                may_come_back = error.code in BUSY | {"DEADLINE_EXCEEDED", "NOT_FOUND"}
                if not may_come_back or self._clock_s() - start_s > self._patience_s:
                    raise
            else:
                return identity.digest == digest
            await self._sleep(delay_s)
            delay_s = min(2.0 * delay_s, _MAX_DELAY_S)

    async def yield_to_others(self) -> bool:
        """Send every request at the lowest priority that all models behind the server know, unless one is given.

        Models without ``priority_levels`` treat all requests alike. Returns whether there is such a priority. Raises
        RemoteError if the server does not answer.
        """
        if "priority" in self._parameters:
            return False
        names = {model.name for model in await self._client.index(ready_only=True, timeout_s=_DESCRIBE_TIMEOUT_S)}
        levels = []
        for name in sorted(names):
            with contextlib.suppress(RemoteError):  # unloaded meanwhile
                config = await self._client.config(name, timeout_s=_DESCRIBE_TIMEOUT_S)
                levels.append(config.dynamic_batching.priority_levels)
        if priority := min(filter(None, levels), default=0):
            self._parameters["priority"] = priority
        return priority > 0

    async def infer(self, inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
        """Make one request and return its outputs, by name; ``on_busy`` is called when the server is overloaded.

        Raises:
            RowsFailed: The request is at fault, or failed as often as it may.
            WeftError: No request can be answered: the job cannot go on.
        """
        num_failures = num_delays = 0
        while True:
            call = InferCall(self._name, self._version, "", dict(self._parameters), dict(inputs), self._outputs)
            try:
                result = await self._client.infer(call, timeout_s=self._timeout_s)
                if result.error is not None:
                    raise result.error
                outputs = {name: decode(tensor, name=name) for name, tensor in result.outputs.items()}
            except WeftError as error:
                if error.code in _FATAL and error.code not in self._busy:
                    raise
                if error.code in self._busy:
                    on_busy()
                    if self._clock_s() - self._last_answer_s > self._patience_s:
                        raise
                else:
                    num_failures += 1
                    self._last_answer_s = self._clock_s()
                    if error.code not in _MAY_PASS or num_failures >= _NUM_TRIES:
                        raise RowsFailed(error, error.path if isinstance(error, RemoteError) else "") from None
                await self._sleep(min(_FIRST_DELAY_S * 2.0**num_delays, _MAX_DELAY_S))
                num_delays += 1
                continue
            self._last_answer_s = self._clock_s()
            return outputs
