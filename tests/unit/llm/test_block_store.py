"""Memory of the second tier: what was saved is loaded, and nothing else ever is."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.llm.block_store import FileStore, MemoryStore, open_store
from weft.llm.config import EngineConfig
from weft.llm.scheduler.plan import BlockTransfers, Int32, UInt8
from weft_kernels.blocks.layout import cache_shape

_NUM_BLOCKS, _NUM_SLOTS = 6, 3


def _kv(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = cache_shape(_NUM_BLOCKS, 2, 4, 2, 8, dtype)
    codes = torch.randint(0, 100, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return codes.view(dtype) if dtype == torch.int8 else codes.to(dtype)


def _block_bytes(kv: torch.Tensor) -> int:
    return kv[0].numel() * kv.itemsize


def _key(number: int) -> bytes:
    return bytes([number]) * 16


def _transfers(saves: list[tuple[int, int, int]] = [], loads: list[tuple[int, int, int]] = []) -> BlockTransfers:  # noqa: B006
    """Saves of (block, slot, key) and loads of (slot, block, key)."""

    def places(rows: list[tuple[int, int, int]]) -> Int32:
        return np.array([row[:2] for row in rows], np.int32).reshape(-1, 2)

    def keys(rows: list[tuple[int, int, int]]) -> UInt8:
        return np.frombuffer(b"".join(_key(row[2]) for row in rows), np.uint8).reshape(-1, 16)

    return BlockTransfers(places(saves), keys(saves), places(loads), keys(loads))


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    """A store of three slots."""
    size = _block_bytes(_kv())
    made = FileStore(3, size, str(tmp_path)) if request.param == "file" else MemoryStore(3, size, is_pinned=False)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_block_comes_back_as_it_was(dtype: torch.dtype, is_file: bool):
    """Saved blocks are loaded bit for bit, scales of 8-bit codes too, into other blocks, in one call or in two."""
    kv = _kv(dtype)
    before = kv.clone()
    size = _block_bytes(kv)
    store = FileStore(3, size, "") if is_file else MemoryStore(3, size, is_pinned=False)
    assert [] == store.run(kv, _transfers(saves=[(1, 2, 7), (2, 0, 8)]))
    kv.view(torch.uint8)[1:3] = 0
    assert [] == store.run(kv, _transfers(saves=[(4, 1, 9)], loads=[(2, 5, 7), (0, 4, 8), (1, 3, 9)]))
    for saved, loaded in ((1, 5), (2, 4), (4, 3)):
        assert torch.equal(before[saved].view(torch.uint8), kv[loaded].view(torch.uint8))
    assert torch.equal(before[0].view(torch.uint8), kv[0].view(torch.uint8))
    store.close()


def test_a_slot_with_another_block_is_a_failed_load(store):
    """A slot that was never written, or that holds a block of another hash, is not loaded; others of the plan are."""
    kv = _kv()
    before = kv.clone()
    assert [4] == store.run(kv, _transfers(saves=[(1, 0, 7)], loads=[(1, 4, 7), (0, 3, 7)]))
    assert torch.equal(before[1], kv[3])
    assert [5] == store.run(kv, _transfers(saves=[(2, 0, 8)], loads=[(0, 5, 7)]))
    assert not store.is_lost


def test_a_closed_store_loads_nothing(store):
    """After ``close``, also twice, every load fails and none raises."""
    kv = _kv()
    store.run(kv, _transfers(saves=[(1, 0, 7)]))
    store.close()
    store.close()
    assert [4] == store.run(kv, _transfers(loads=[(0, 4, 7)]))


def test_the_file_has_no_name_and_is_for_its_owner_alone(tmp_path: Path):
    """The file is not in its folder, so it ends with the process; its mode is 0600; its space is taken at once."""
    store = FileStore(_NUM_SLOTS, 4096, str(tmp_path))
    status = os.fstat(store._file.fileno())
    assert [] == list(tmp_path.iterdir())
    assert (0, 0o600, _NUM_SLOTS * 4096) == (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_size)
    assert status.st_blocks * 512 >= status.st_size
    store.close()


def _cut_off(descriptor: int) -> None:
    os.truncate(f"/proc/self/fd/{descriptor}", 100)


def _tear(descriptor: int) -> None:
    for slot in (0, 2):
        os.pwrite(descriptor, b"\xff", slot * _block_bytes(_kv()) + 5)


@pytest.mark.parametrize("damage", [_cut_off, _tear])
def test_a_damaged_file_is_a_failed_load(tmp_path: Path, damage: Callable[[int], None]):
    """What another process cut off, or one changed byte, is not loaded, ends no process, and later saves work."""
    kv = _kv()
    store = FileStore(3, _block_bytes(kv), str(tmp_path))
    store.run(kv, _transfers(saves=[(1, 0, 7), (2, 2, 8)]))
    damage(store._file.fileno())
    assert [3, 4] == store.run(kv, _transfers(loads=[(0, 3, 7), (2, 4, 8)]))
    assert [] == store.run(kv, _transfers(saves=[(1, 1, 9)], loads=[(1, 5, 9)]))
    assert torch.equal(kv[1], kv[5])
    store.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_broken_disk_ends_the_store_and_nothing_else(tmp_path: Path, monkeypatch, caplog, call: str):
    """An error of the disk is logged once; from then on nothing is saved and every load fails."""
    kv = _kv()
    store = FileStore(3, _block_bytes(kv), str(tmp_path))
    store.run(kv, _transfers(saves=[(1, 0, 7)]))

    def broken(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, broken)
    assert [4, 5] == store.run(kv, _transfers(saves=[(2, 1, 8)], loads=[(0, 4, 7), (1, 5, 8)]))
    monkeypatch.undo()
    assert store.is_lost
    assert [4] == store.run(kv, _transfers(saves=[(2, 1, 8)], loads=[(1, 4, 8)]))
    assert 1 == sum("cannot be used any more" in record.message for record in caplog.records)


def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path):
    """A path that does not exist, or is a file, is an error that names the parameter and the path."""
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path / "missing", file):
        with pytest.raises(InvalidArgumentError, match=r"kv_offload_path must be a folder.*got '.*/(missing|file)'"):
            FileStore(1, 64, str(path))


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch):
    """If the disk has no room for the whole file, that is an error when the model is loaded, and the file is gone."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhaustedError, match=r"has no room for that: No space left.*lower it"):
        FileStore(1, 64, str(tmp_path))
    with pytest.raises(ResourceExhaustedError):  # nothing is allocated for its slots before that
        open_store(EngineConfig(kv_offload_bytes=2**62), _kv())


def test_memory_that_the_host_does_not_have_is_refused():
    """Pinned memory that cannot be allocated is an error that names the parameter."""
    with pytest.raises(ResourceExhaustedError, match=r"kv_offload_bytes is .* lower it"):
        MemoryStore(2**30, 2**30, is_pinned=False)


def test_the_parameters_decide():
    """Without ``kv_offload_bytes`` there is no store; less than a block is refused; else it has as many as fit."""
    kv = _kv()
    size = _block_bytes(kv)
    assert open_store(EngineConfig(), kv) is None
    with pytest.raises(InvalidArgumentError, match=f"at least {size}, one block of this model, got 5"):
        open_store(EngineConfig(kv_offload_bytes=5), kv)
    store = open_store(EngineConfig(kv_offload_bytes=3 * size + 1), kv)
    assert store is not None
    assert store.num_slots == 3
    store.close()
