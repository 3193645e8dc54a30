"""Blocks of KV caches between model services: asked for by hash, answered in pieces. ``BlockExchange``.

A question is a ``ModelInfer`` with the parameter ``kv_source``, which passes no model's queue. So it has TLS, keys and
deadlines like every call, and over a Unix socket large pieces go through shared memory. As many pieces are asked for as
may be in flight, and the next one when one is taken in.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError
from weft.base.tensors import WireTensor
from weft.v2.client.local_tensors import LocalTensors
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.handover import SOURCE, verified_source
from weft.v2.protocol.wire import result_of
from weft.v2.security.channel import ChannelSecurity

#: Most bytes of a piece, unless a block has more, and most pieces in flight in a process, each way.
PIECE_BYTES = 2 << 20
MAX_PIECES = 16
#: How long a piece may take, in seconds.
_PIECE_S = 10.0
_HASH_BYTES = 16
_HASHES, _BLOCKS = "hashes", "blocks"

#: Takes in blocks by their hashes; False: they are not wanted any more.
Write = Callable[[Sequence[bytes], bytes], Awaitable[bool]]
#: What an engine offers, to be called on the event loop: contents of the blocks of the leading hashes that it has, one
#: behind the other; and the end of a lease, if there is such a one.
BlockSource = tuple[Callable[[Sequence[bytes]], "Future[bytes]"], Callable[[str], object]]


class BlockExchange:
    """Answers questions for blocks of this process, and fetches blocks of others. Create it on the event loop.

    Args:
        key: Of the mesh; "": nothing is fetched.

    Attributes:
        sources: By a token that nobody can guess.
        loop: On which ``fetch`` runs.
    """

    def __init__(self, key: str, security: ChannelSecurity | None = None) -> None:
        self.key = key
        self.sources: dict[str, BlockSource] = {}
        self.loop = asyncio.get_running_loop()
        self._security = security
        self._peers: dict[str, tuple[V2Client, LocalTensors | None]] = {}
        self._asking, self._answering = asyncio.Semaphore(MAX_PIECES), asyncio.Semaphore(MAX_PIECES)

    async def answer(self, call: InferCall) -> InferResult:
        """Answer a question for blocks; one without hashes ends the lease. Raises a WeftError."""
        token, _, lease = str(call.parameters[SOURCE]).partition(".")
        source = self.sources.get(token)
        if source is None:
            raise NotFoundError(f"parameter '{SOURCE}' names no engine of this process; it is another one by now")
        data = bytes(call.inputs[_HASHES].data) if _HASHES in call.inputs else b""
        if len(data) % _HASH_BYTES or len(data) > PIECE_BYTES:
            allowed = f"hashes of {_HASH_BYTES} bytes, at most {PIECE_BYTES} bytes in all"
            raise InvalidArgumentError(f"input '{_HASHES}' must have {allowed}, got {len(data)}")
        if not data:
            source[1](lease)
            return InferResult(call.model_name, "", call.request_id)
        hashes = [data[start : start + _HASH_BYTES] for start in range(0, len(data), _HASH_BYTES)]
        async with self._answering:
            blocks = await asyncio.wrap_future(source[0](hashes))
        tensor = WireTensor("UINT8", (len(blocks),), blocks)
        return InferResult(call.model_name, "", call.request_id, outputs={_BLOCKS: tensor})

    async def fetch(self, source: str, model: str, hashes: Sequence[bytes], block_bytes: int, write: Write) -> None:
        """Fetch blocks, all or until one does not come; ``write`` gets the pieces, in any order.

        Raises InvalidArgumentError for a wrong signature, else ExceptionGroup: what was asked for has not come whole.
        """
        address, lease = verified_source(self.key, source)

        async def pull(piece: Sequence[bytes]) -> None:
            async with self._asking:
                tensor = WireTensor("UINT8", (len(piece), _HASH_BYTES), b"".join(piece))
                question = InferCall(model, parameters={SOURCE: lease}, inputs={_HASHES: tensor})
                data = (await self._ask(address, question)).outputs[_BLOCKS].data
                num_blocks = len(data) // block_bytes
                is_wanted = await write(piece[:num_blocks], data)
            if not is_wanted or num_blocks < len(piece):
                raise UnavailableError(f"{num_blocks} of {len(piece)} blocks came, or none was wanted any more")

        num_each = max(PIECE_BYTES // block_bytes, 1)
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(hashes), num_each):
                group.create_task(pull(hashes[start : start + num_each]))

    async def release(self, source: str, model: str) -> None:
        """End the lease of a source, as far as it can be reached; it has a deadline too."""
        with contextlib.suppress(Exception):
            address, lease = verified_source(self.key, source)
            await self._ask(address, InferCall(model, parameters={SOURCE: lease}))

    async def close(self) -> None:
        """Close the channels."""
        for client, tensors in self._peers.values():
            await client.close()
            if tensors is not None:
                tensors.close()

    async def _ask(self, address: str, question: InferCall) -> InferResult:
        if address not in self._peers:
            client = V2Client(address, where=f"the model service at '{address}'", security=self._security)
            self._peers[address] = client, LocalTensors(address) if address.startswith("unix:") else None
        client, tensors = self._peers[address]
        if tensors is None:
            return await client.infer(question, timeout_s=_PIECE_S)
        return result_of(await tensors.infer(question, partial(client.model_infer, timeout=_PIECE_S)))
