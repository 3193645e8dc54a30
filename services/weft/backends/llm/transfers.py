"""Prefill apart from decode, at one instance: prompts computed for others, and blocks fetched from others."""

import asyncio
import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from weft.backends.llm.settings import Settings
from weft.backends.llm.tensors import GenerationRequest
from weft.base.core import Parameters
from weft.base.errors import UnsupportedError
from weft.base.observing.logs import get_logger
from weft.llm.request import EngineRequest
from weft.serving.backends.base import ModelContext
from weft.serving.block_exchange import PIECE_BYTES, BlockExchange
from weft.v2.protocol.handover import LEASE, ROLE, SOURCE

#: How long blocks are held for another replica, or for a request, in seconds.
LEASE_S = 30.0

_LOG = get_logger("weft.model.llm")


class BlockTransfers:
    """Answers for the blocks of one engine, and fetches others. Raises InvalidArgumentError for an impossible role."""

    def __init__(self, engine: Any, model: ModelContext, settings: Settings) -> None:
        fault = ""
        if settings.role != "both" and not engine.transfers.block_bytes:
            fault = "must be both for a model that runs on several ranks, whose blocks cannot be copied yet"
        elif settings.role != "both" and not model.mesh_key:
            fault = "needs the key by which services of a mesh name blocks alike; start them with --mesh-key-file"
        if fault:
            raise model.error(f"parameters[{ROLE}].string_value", f"role '{settings.role}' {fault}")
        self._engine = engine
        self._model = model.signature.name
        self._settings = settings
        self._exchange: BlockExchange | None = model.blocks if model.mesh_key else None
        self._token = token_hex(16)
        if self._exchange is not None:
            self._exchange.sources[self._token] = (
                lambda hashes: engine.transfer(lambda transfers: transfers.read(hashes, PIECE_BYTES)),
                lambda lease: engine.transfer(lambda transfers: transfers.release(lease)),
            )

    def close(self) -> None:
        """Answer no more questions."""
        if self._exchange is not None:
            self._exchange.sources.pop(self._token, None)

    def prepare(self, request: EngineRequest, generation_request: GenerationRequest, parameters: Parameters) -> str:
        """Have a request end after its first token, if it asks for that and can; returns the ``HANDOVER``, or ""."""
        is_single = generation_request.is_streamed and request.params.n == 1 and not request.resume_token_ids
        if self._settings.role == "prefill" and parameters.get(LEASE) is True and is_single:
            request.hold_s, request.lease = LEASE_S, token_hex(16)
            return f"{self._token}.{request.lease}"
        return ""

    def submit(self, request: EngineRequest, parameters: Parameters, events: list[Any]) -> None:
        """Submit a request, once the blocks that it may fetch have come or not; ``events`` are of its span."""
        self._engine.prepare(request)
        if self._exchange is None or SOURCE not in parameters or request.hold_s:  # a request has one lease
            self._engine.enqueue(request)
        else:
            fetch = self._fetch(self._exchange, request, str(parameters[SOURCE]), events)
            asyncio.run_coroutine_threadsafe(fetch, self._exchange.loop)

    async def _fetch(self, exchange: BlockExchange, request: EngineRequest, source: str, events: list[Any]) -> None:
        engine, start_ns, num_bytes, outcome = self._engine, time.monotonic_ns(), 0, "failed"
        lease_end_ns = start_ns + int(LEASE_S * 1e9)
        block_bytes = engine.transfers.block_bytes
        num_computed = len(request.prompt_ids) + len(request.resume_token_ids) - 1  # the source made the last token
        hashes = request.block_hashes[: num_computed // engine.pool.block_size]

        async def write(piece: Sequence[bytes], data: bytes) -> bool:
            work = engine.transfer(lambda transfers: transfers.write(request, piece, data))
            return bool(await asyncio.wrap_future(work))

        timeout_s = self._settings.kv_transfer_timeout_ms / 1e3
        if request.deadline_ns is not None:
            timeout_s = min(timeout_s, (request.deadline_ns - start_ns) / 1e9)
        try:
            if not block_bytes:
                raise UnsupportedError("this model runs on several ranks, into which blocks cannot be copied yet")
            async with asyncio.timeout(timeout_s):
                hold = engine.transfer(lambda transfers: transfers.hold(request, hashes, lease_end_ns))
                missing = await asyncio.wrap_future(hold)
                await exchange.fetch(source, self._model, missing, block_bytes, write)
            outcome, num_bytes = "complete", len(missing) * block_bytes
        except Exception as error:
            outcome = "late" if isinstance(error, TimeoutError) else "failed"
            _LOG.warning("blocks for request '%s' did not come, they are computed: %r", request.id, error)
        finally:
            end_ns = time.monotonic_ns()
            seconds = (end_ns - start_ns) / 1e9
            events.append(("kv_transfer", end_ns, {"weft.kv.bytes": num_bytes, "weft.kv.seconds": seconds}))
            engine.metrics.transfers[outcome] += 1
            if outcome == "complete":
                engine.metrics.transfer_time.observe(seconds)
            engine.enqueue(request)
            await exchange.release(source, self._model)
