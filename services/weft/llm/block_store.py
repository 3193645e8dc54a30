"""Storage of the KV cache's second tier: a file for a CPU, pinned host memory for a GPU. ``open_store``."""

import os
import tempfile
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.base.observing.logs import get_logger
from weft.llm import ops
from weft.llm.config import EngineConfig
from weft.llm.scheduler.plan import BlockTransfers

_LOG = get_logger("weft.llm")


def open_store(config: EngineConfig, kv: Tensor) -> "FileStore | MemoryStore | None":
    """Open the store configured by ``kv_offload_bytes`` and ``kv_offload_path``; None if disabled.

    Raises:
        InvalidArgumentError: It would hold no block, or the path is not a folder in which files can be written.
        ResourceExhaustedError: The disk, or the memory, has less room.
    """
    if not config.kv_offload_bytes:
        return None
    block_bytes = kv[0].numel() * kv.itemsize
    num_slots = config.kv_offload_bytes // block_bytes
    if not num_slots:
        raise InvalidArgumentError(
            f"engine: kv_offload_bytes must be 0 or at least {block_bytes}, one block of this model, "
            f"got {config.kv_offload_bytes}"
        )
    if kv.is_cuda:
        return MemoryStore(num_slots, block_bytes, is_pinned=True)
    return FileStore(num_slots, block_bytes, config.kv_offload_path)


class FileStore:
    """Blocks in an unnamed file in ``directory``, which disappears with the process.

    Its mode is 0600. It uses system calls, not a mapping: if another process truncates the file, or the disk is full or
    broken, a mapping kills the process with SIGBUS; a call returns an error. A checksum and the block's hash are kept
    in memory for each slot, so that neither a torn nor a missing write passes for a block. Measured on a virtual disk,
    blocks of 200 kB in the page cache: 6 GB/s written, 16 GB/s read, checksums at 7 GB/s. Not thread-safe.

    Attributes:
        is_lost: It has failed: nothing is saved, and every load fails.

    Raises:
        InvalidArgumentError: No file can be created there.
        ResourceExhaustedError: The disk has less room.
    """

    def __init__(self, num_slots: int, block_bytes: int, directory: str) -> None:
        self.num_slots = num_slots
        self.is_lost = False
        self._block_bytes = block_bytes
        place = directory or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115  # closed by ``close``
        except OSError as error:
            raise InvalidArgumentError(
                f"engine: kv_offload_path must be a folder in which files can be written, got '{place}': "
                f"{error.strerror}"
            ) from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_slots * block_bytes)
        except OSError as error:
            self._file.close()
            raise ResourceExhaustedError(
                f"engine: kv_offload_bytes is {num_slots * block_bytes} after rounding to blocks, but '{place}' has no "
                f"room for that: {error.strerror}; lower it, or set kv_offload_path to a folder of a larger disk"
            ) from error
        self._keys: list[tuple[bytes, int] | None] = [None] * num_slots  # hash and checksum

    def run(self, kv: Tensor, transfers: BlockTransfers) -> list[int]:
        """Save, then load blocks of ``kv``, contiguous ``[num_blocks, ...]``.

        Returns:
            Blocks whose load failed, because the slot does not hold what was saved under that hash; their contents are
            undefined.
        """
        rows = kv.view(torch.uint8).view(len(kv), -1).numpy()
        try:
            for (block, slot), key in zip(transfers.saves.tolist(), transfers.save_keys, strict=True):
                self._save(slot, key.tobytes(), memoryview(rows[block]))
            return [
                block
                for (slot, block), key in zip(transfers.loads.tolist(), transfers.load_keys, strict=True)
                if not self._load(slot, key.tobytes(), memoryview(rows[block]))
            ]
        except OSError as error:
            _LOG.error("the KV cache's file cannot be used any more, its blocks are recomputed: %s", error)
            self.is_lost = True
            self.close()
            return [int(block) for _, block in transfers.loads]

    def close(self) -> None:
        """Free the file; further loads fail."""
        self._keys = [None] * self.num_slots
        self._file.close()

    def _save(self, slot: int, block_hash: bytes, row: "memoryview[int]") -> None:
        self._keys[slot] = None
        if self.is_lost:
            return
        start, num_done = slot * self._block_bytes, 0
        while num_done < len(row):
            num_done += os.pwrite(self._file.fileno(), row[num_done:], start + num_done)
        self._keys[slot] = (block_hash, zlib.crc32(row))

    def _load(self, slot: int, block_hash: bytes, row: "memoryview[int]") -> bool:
        key = self._keys[slot]
        if key is None or key[0] != block_hash:
            return False
        start, num_done = slot * self._block_bytes, 0
        while num_done < len(row):
            num_read = os.preadv(self._file.fileno(), [row[num_done:]], start + num_done)
            if not num_read:
                return False
            num_done += num_read
        return zlib.crc32(row) == key[1]


class MemoryStore:
    """Blocks in host memory, copied by the device in the order of its other work, so that no step waits for them.

    ``is_pinned`` locks the memory, so that a GPU can copy asynchronously. Raises ResourceExhaustedError if the host has
    too little memory.
    """

    def __init__(self, num_slots: int, block_bytes: int, *, is_pinned: bool) -> None:
        self.num_slots = num_slots
        self.is_lost = False
        try:
            self._rows = torch.empty(num_slots, block_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:
            raise ResourceExhaustedError(
                f"engine: kv_offload_bytes is {num_slots * block_bytes} after rounding to blocks, but the host cannot "
                f"allocate that much memory; lower it"
            ) from error
        self._keys: list[bytes | None] = [None] * num_slots

    def run(self, kv: Tensor, transfers: BlockTransfers) -> list[int]:
        """See ``FileStore``."""
        if len(transfers.saves):
            blocks, slots = transfers.saves.T
            rows = ops.gather_blocks(kv, _ids(blocks, kv)).view(torch.uint8).view(len(blocks), -1)
            for row, slot, key in zip(rows, slots.tolist(), transfers.save_keys, strict=True):
                self._rows[slot].copy_(row, non_blocking=True)
                self._keys[slot] = key.tobytes()
        keys = [key.tobytes() for key in transfers.load_keys]
        pairs = transfers.loads.tolist()
        good = [pair for pair, key in zip(pairs, keys, strict=True) if self._keys[pair[0]] == key]
        if good:
            data = torch.empty((len(good), *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
            for row, (slot, _) in zip(data.view(torch.uint8).view(len(good), -1), good, strict=True):
                row.copy_(self._rows[slot], non_blocking=True)
            ops.scatter_blocks(kv, _ids([block for _, block in good], kv), data)
        return [block for pair in pairs if pair not in good for block in pair[1:]]

    def close(self) -> None:
        """See ``FileStore``."""
        self._keys = [None] * self.num_slots
        self._rows = self._rows[:0]


def read_blocks(kv: Tensor, blocks: Sequence[int]) -> bytes:
    """Contents of blocks of ``kv``, one behind the other."""
    rows: Sequence[int] = blocks
    if kv.is_cuda:
        kv, rows = ops.gather_blocks(kv, _ids(blocks, kv)).cpu(), range(len(blocks))
    data = kv.view(torch.uint8).view(len(kv), -1).numpy()
    return b"".join([data[row] for row in rows])


def write_blocks(kv: Tensor, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
    """Set the contents of blocks of ``kv``, ``[len(blocks), bytes of a block]``."""
    if kv.is_cuda:
        data = torch.from_numpy(rows.copy()).to(kv.device).view(kv.dtype).view(len(blocks), *kv.shape[1:])
        ops.scatter_blocks(kv, _ids(blocks, kv), data)
    else:
        kv.view(torch.uint8).view(len(kv), -1).numpy()[list(blocks)] = rows


def _ids(blocks: "Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]", kv: Tensor) -> Tensor:
    return torch.from_numpy(np.array(blocks, np.int32)).to(kv.device)
