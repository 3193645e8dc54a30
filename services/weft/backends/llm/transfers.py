"""Prefill apart from decode, at one instance: prompts computed for others, and blocks fetched from others."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from weft.backends.llm.settings import Settings
from weft.backends.llm.tensors import GenerationRequest
from weft.base.core import Parameters
from weft.base.observing.logs import get_logger
from weft.llm.request import EngineRequest
from weft.serving.backends.base import ModelContext
from weft.serving.block_exchange import BlockExchange
from weft.serving.handover import LEASE, ROLE, SOURCE

if TYPE_CHECKING:
    from weft.backends.llm.generation import Generation

#: The engine waits so much longer than a fetch may take, in seconds.
_MARGIN_S = 1.0

_LOG = get_logger("weft.model.llm")


class BlockTransfers:
    """Answers for the blocks of one engine, and fetches blocks for its requests. A ``BlockSource``.

    Raises:
        InvalidArgumentError: The role needs what the service does not have.
    """

    def __init__(self, engine: Any, model: ModelContext, settings: Settings) -> None:
        if settings.role != "both" and not engine.transfers.block_bytes:
            raise model.fault(
                f"parameters[{ROLE}].string_value",
                f"model '{model.signature.name}': role must be both for a model that runs on several ranks, whose "
                f"blocks cannot be copied yet, got '{settings.role}'",
            )
        if settings.role != "both" and not model.mesh_key:
            raise model.fault(
                f"parameters[{ROLE}].string_value",
                f"model '{model.signature.name}': role '{settings.role}' needs the key of the mesh, by which services "
                f"name blocks alike; start the service with --mesh-key-file, or set role to both",
            )
        self._engine = engine
        self._model = model.signature.name
        self._settings = settings
        self._exchange: BlockExchange | None = model.blocks
        self._token = token_hex(16)
        self._leases: dict[str, EngineRequest] = {}
        if self._exchange is not None:
            self._exchange.attach(self._token, self)

    def close(self) -> None:
        """Answer no more questions."""
        if self._exchange is not None:
            self._exchange.detach(self._token)

    def read(self, hashes: Sequence[bytes]) -> "Future[bytes]":
        """See ``BlockSource``."""
        future: Future[bytes] = self._engine.transfer(lambda transfers: transfers.read(hashes))
        return future

    def release(self, lease: str) -> None:
        """See ``BlockSource``."""
        request = self._leases.pop(lease, None)
        if request is not None:
            self._engine.transfer(lambda transfers: transfers.end(request))

    def prepare(self, request: EngineRequest, generation_request: GenerationRequest, parameters: Parameters) -> str:
        """Have a request end after its first token, or wait for blocks, if it asks for that and can.

        Returns:
            The source of its blocks, for ``HANDOVER``; "" if it does not hand over.
        """
        params, settings, now_ns = request.params, self._settings, time.monotonic_ns()
        if parameters.get(LEASE) is True and settings.role == "prefill":
            if generation_request.is_streamed and params.n == 1 and not request.resume_token_ids:
                request.hold_s = settings.kv_lease_ms / 1e3
                lease = token_hex(16)
                self._leases[lease] = request
                return f"{self._token}.{lease}"
        elif SOURCE in parameters and self._exchange is not None and self._exchange.key:
            request.fetch_until_ns = now_ns + settings.kv_transfer_timeout_ms * 1_000_000 + int(_MARGIN_S * 1e9)
        return ""

    def forget(self, source: str) -> None:
        """Forget the lease of a request that has ended."""
        self._leases.pop(source.rpartition(".")[2], None)

    def begin(self, request: EngineRequest, parameters: Parameters, generation: "Generation") -> None:
        """Fetch what a submitted request waits for; it goes on without what does not come."""
        if not request.fetch_until_ns or self._exchange is None:
            return
        engine, exchange, source, start_ns = self._engine, self._exchange, str(parameters[SOURCE]), time.monotonic_ns()
        lease_ns = start_ns + self._settings.kv_lease_ms * 1_000_000

        def ask(missing: "Future[list[bytes]]") -> None:
            if missing.cancelled() or missing.exception() is not None:
                end(missing)
                return
            hashes = missing.result()
            generation.transfer = start_ns, 0, len(hashes) * engine.transfers.block_bytes
            write = partial(self._write, request)
            timeout_s = self._settings.kv_transfer_timeout_ms / 1e3
            exchange.fetch(
                source, self._model, hashes, engine.transfers.block_bytes, write, timeout_s
            ).add_done_callback(end)

        def end(done: "Future[Any]") -> None:
            error = "the engine has stopped" if done.cancelled() else done.exception()
            end_ns = time.monotonic_ns()
            outcome = "late" if isinstance(error, TimeoutError) else "failed" if error else "complete"
            generation.transfer = start_ns, end_ns, generation.transfer[2] if error is None else 0
            if error is not None:
                _LOG.warning("blocks for request '%s' did not come, they are computed: %r", request.id, error)
            engine.fetched(request, outcome, (end_ns - start_ns) / 1e9)

        engine.transfer(lambda transfers: transfers.begin(request, lease_ns)).add_done_callback(ask)

    def _write(self, request: EngineRequest, hashes: Sequence[bytes], data: bytes) -> "Future[bool]":
        future: Future[bool] = self._engine.transfer(lambda transfers: transfers.write(request, hashes, data))
        return future
