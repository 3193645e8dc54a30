"""Prefill apart from decode, at one instance: prompts computed for others, and blocks fetched from others."""

import asyncio
import time
from collections.abc import Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from weft.backends.llm.settings import Settings
from weft.backends.llm.tensors import GenerationRequest
from weft.base.core import Parameters
from weft.base.observing.logs import get_logger
from weft.llm.request import EngineRequest
from weft.serving.backends.base import ModelContext
from weft.serving.block_exchange import BlockExchange, BlockSource
from weft.v2.protocol.handover import LEASE, ROLE, SOURCE

if TYPE_CHECKING:
    from weft.backends.llm.generation import Generation

_LOG = get_logger("weft.model.llm")


class BlockTransfers:
    """Answers for the blocks of one engine, and fetches blocks for its requests.

    Raises:
        InvalidArgumentError: The role needs what the engine or the service does not have.
    """

    def __init__(self, engine: Any, model: ModelContext, settings: Settings) -> None:
        fault = ""
        if settings.role != "both" and not engine.transfers.block_bytes:
            fault = "must be both for a model that runs on several ranks, whose blocks cannot be copied yet"
        elif settings.role != "both" and not model.mesh_key:
            fault = "needs the key by which services of a mesh name blocks alike; start them with --mesh-key-file"
        if fault:
            message = f"model '{model.signature.name}': role '{settings.role}' {fault}"
            raise model.fault(f"parameters[{ROLE}].string_value", message)
        self._engine = engine
        self._model = model.signature.name
        self._settings = settings
        self._exchange: BlockExchange | None = model.blocks if model.mesh_key else None
        self._token = token_hex(16)
        self._leases: dict[str, EngineRequest] = {}
        if self._exchange is not None:
            read = lambda hashes: engine.transfer(lambda transfers: transfers.read(hashes))  # noqa: E731
            self._exchange.sources[self._token] = BlockSource(read, self._release)

    def close(self) -> None:
        """Answer no more questions."""
        if self._exchange is not None:
            self._exchange.sources.pop(self._token, None)

    def prepare(self, request: EngineRequest, generation_request: GenerationRequest, parameters: Parameters) -> str:
        """Have a request end after its first token, if it asks for that and can.

        Returns:
            The source of its blocks, for ``HANDOVER``; "" if it does not hand over.
        """
        settings = self._settings
        is_single = generation_request.is_streamed and request.params.n == 1 and not request.resume_token_ids
        if settings.role == "prefill" and parameters.get(LEASE) is True and is_single:
            request.hold_s = settings.kv_lease_ms / 1e3
            lease = token_hex(16)
            self._leases[lease] = request
            return f"{self._token}.{lease}"
        return ""

    def forget(self, source: str) -> None:
        """Forget the lease of a request that has ended."""
        self._leases.pop(source.rpartition(".")[2], None)

    def submit(self, request: EngineRequest, parameters: Parameters, generation: "Generation") -> None:
        """Submit a request, first fetching the blocks that it may; what does not come is computed. Raises WeftError."""
        self._engine.prepare(request)
        if self._exchange is None or SOURCE not in parameters:
            self._engine.enqueue(request)
        else:
            fetch = self._fetch(self._exchange, request, str(parameters[SOURCE]), generation)
            asyncio.run_coroutine_threadsafe(fetch, self._exchange.loop)

    async def _fetch(
        self, exchange: BlockExchange, request: EngineRequest, source: str, generation: "Generation"
    ) -> None:
        engine, start_ns, num_bytes, outcome = self._engine, time.monotonic_ns(), 0, "failed"
        lease_end_ns = start_ns + self._settings.kv_lease_ms * 1_000_000
        block_bytes = engine.transfers.block_bytes

        async def write(hashes: Sequence[bytes], data: bytes) -> bool:
            work = engine.transfer(lambda transfers: transfers.write(request, hashes, data))
            return bool(await asyncio.wrap_future(work))

        timeout_s = self._settings.kv_transfer_timeout_ms / 1e3
        if request.deadline_ns is not None:
            timeout_s = min(timeout_s, (request.deadline_ns - start_ns) / 1e9)
        try:
            async with asyncio.timeout(timeout_s):
                begin = engine.transfer(lambda transfers: transfers.begin(request, lease_end_ns))
                missing = await asyncio.wrap_future(begin)
                await exchange.fetch(source, self._model, missing, block_bytes, write)
            outcome, num_bytes = "complete", len(missing) * block_bytes
        except Exception as error:
            outcome = "late" if isinstance(error, TimeoutError) else "failed"
            _LOG.warning("blocks for request '%s' did not come, they are computed: %r", request.id, error)
        finally:
            end_ns = time.monotonic_ns()
            generation.transfer = start_ns, end_ns, num_bytes
            engine.metrics.record_transfer(outcome, (end_ns - start_ns) / 1e9)
            engine.enqueue(request)

    def _release(self, lease: str) -> None:
        request = self._leases.pop(lease, None)
        if request is not None:
            self._engine.transfer(lambda transfers: transfers.end(request))
