"""Blocks of KV caches between model services: asked for by hash, answered in pieces. ``BlockExchange``.

A question is a ``ModelInfer`` with the parameter ``kv_source``, which passes no model's queue. So it has TLS, keys and
deadlines like every call, and over a Unix socket large pieces go through shared memory. As many pieces are asked for as
may be in flight, and the next one when one is taken in.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError
from weft.base.tensors import WireTensor
from weft.serving.handover import SOURCE, verified_source
from weft.v2.client.local_tensors import LocalTensors
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.wire import result_of
from weft.v2.security.channel import ChannelSecurity

#: Most bytes of a piece, unless a block has more, and most pieces in flight in a process, each way.
PIECE_BYTES = 2 << 20
MAX_PIECES = 16
_HASH_BYTES = 16
#: More hashes than any piece has.
_MAX_HASHES = 1 << 16
_HASHES, _BLOCKS = "hashes", "blocks"

#: Takes in blocks by their hashes; False: they are not wanted any more.
Write = Callable[[Sequence[bytes], bytes], "Future[bool]"]


class BlockSource(Protocol):
    """An engine that gives blocks. Any thread."""

    def read(self, hashes: Sequence[bytes]) -> "Future[bytes]":
        """Contents of the blocks of the leading ``hashes`` that it has, one behind the other."""

    def release(self, lease: str) -> None:
        """End a lease; no effect if it is unknown or has ended."""


class BlockExchange:
    """Answers questions for blocks of this process, and fetches blocks of others. Create it on the event loop.

    Args:
        key: Of the mesh; "": nothing is fetched.
        security: Of channels to other model services.
        shares_memory: Large pieces go through shared memory where both are on one machine; False: for measurements.
    """

    def __init__(self, key: str, security: ChannelSecurity | None = None, *, shares_memory: bool = True) -> None:
        self.key = key
        self._security = security
        self._shares_memory = shares_memory
        self._loop = asyncio.get_running_loop()
        self._sources: dict[str, BlockSource] = {}
        self._peers: dict[str, _Peer] = {}
        self._asking, self._answering = asyncio.Semaphore(MAX_PIECES), asyncio.Semaphore(MAX_PIECES)

    def attach(self, token: str, source: BlockSource) -> None:
        """Answer for ``source``, whose token nobody can guess. Any thread."""
        self._sources[token] = source

    def detach(self, token: str) -> None:
        """Undo ``attach``. Any thread."""
        self._sources.pop(token, None)

    async def answer(self, call: InferCall) -> InferResult:
        """Answer a question for blocks; one without hashes ends the lease.

        Raises:
            InvalidArgumentError: The hashes are malformed.
            NotFoundError: The source is not here, or not any more.
            UnavailableError: Its engine has stopped.
        """
        token, _, lease = str(call.parameters[SOURCE]).partition(".")
        source = self._sources.get(token)
        if source is None:
            raise NotFoundError(f"parameter '{SOURCE}' names no engine of this process: it is another one by now")
        data = call.inputs[_HASHES].data if _HASHES in call.inputs else b""
        if len(data) % _HASH_BYTES or len(data) > _MAX_HASHES * _HASH_BYTES:
            raise InvalidArgumentError(
                f"input '{_HASHES}' must have 0 to {_MAX_HASHES} hashes of {_HASH_BYTES} bytes, got {len(data)} bytes"
            )
        if not data:
            source.release(lease)
            return InferResult(call.model_name, "", call.request_id)
        async with self._answering:
            try:
                blocks = await asyncio.wrap_future(source.read(_split(data)))
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                raise UnavailableError("the engine has stopped") from None
        outputs = {_BLOCKS: WireTensor("UINT8", (len(blocks),), blocks)}
        return InferResult(call.model_name, "", call.request_id, outputs=outputs)

    def fetch(
        self, source: str, model: str, hashes: Sequence[bytes], block_bytes: int, write: Write, timeout_s: float
    ) -> "Future[None]":
        """Fetch blocks and end the lease; ``write`` gets the pieces in any order. Any thread.

        The future fails if a block is missing, not wanted or late, or the source is unreachable or not signed.
        """
        fetch = self._fetch(source, model, hashes, block_bytes, write, timeout_s)
        return asyncio.run_coroutine_threadsafe(fetch, self._loop)

    async def close(self) -> None:
        """Close the channels."""
        for peer in self._peers.values():
            await peer.close()

    async def _fetch(
        self, source: str, model: str, hashes: Sequence[bytes], block_bytes: int, write: Write, timeout_s: float
    ) -> None:
        address, lease = verified_source(self.key, source)
        if address not in self._peers:
            self._peers[address] = _Peer(address, self._security, shares_memory=self._shares_memory)
        ask = partial(self._peers[address].ask, timeout_s=timeout_s)
        question = InferCall(model, parameters={SOURCE: lease})

        async def pull(piece: Sequence[bytes]) -> None:
            async with self._asking:
                tensor = WireTensor("UINT8", (len(piece), _HASH_BYTES), b"".join(piece))
                result = await ask(InferCall(model, parameters={SOURCE: lease}, inputs={_HASHES: tensor}))
                data = result.outputs[_BLOCKS].data
                num_blocks = len(data) // block_bytes
                is_wanted = await asyncio.wrap_future(write(piece[:num_blocks], data))
            if not is_wanted or num_blocks < len(piece):
                raise UnavailableError(f"{num_blocks} of {len(piece)} blocks came, or none was wanted any more")

        num_each = max(PIECE_BYTES // block_bytes, 1)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for start in range(0, len(hashes), num_each):
                    group.create_task(pull(hashes[start : start + num_each]))
        finally:
            with contextlib.suppress(Exception):  # the lease has a deadline too
                await ask(question)


class _Peer:
    """A model service that has blocks."""

    def __init__(self, address: str, security: ChannelSecurity | None, *, shares_memory: bool) -> None:
        self._client = V2Client(address, where=f"the model service at '{address}'", security=security)
        is_local = shares_memory and address.startswith("unix:")
        self._tensors = LocalTensors(address) if is_local else None

    async def ask(self, question: InferCall, *, timeout_s: float) -> InferResult:
        if self._tensors is None:
            return await self._client.infer(question, timeout_s=timeout_s)
        invoke = partial(self._client.model_infer, timeout=timeout_s)
        return result_of(await self._tensors.infer(question, invoke))

    async def close(self) -> None:
        await self._client.close()
        if self._tensors is not None:
            self._tensors.close()


def _split(data: bytes) -> list[bytes]:
    return [bytes(data[start : start + _HASH_BYTES]) for start in range(0, len(data), _HASH_BYTES)]
