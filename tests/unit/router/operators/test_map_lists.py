"""Lists are cut into chunks and put together again, whatever their rows are."""

import random

import numpy as np
import pytest

from weft.base.tensors import ITEMSIZE_BYTES, WireTensor
from weft.router.operators.map.lists import Lists, Rows, stacked


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("datatype", ["BYTES", "FP16", "BF16", "BOOL"])
def test_chunks_of_any_size_make_the_lists_again(datatype: str, seed: int) -> None:
    """Rows without dims or of none, empty strings, empty lists: what counts stays, and padding is zeros."""
    chance = random.Random(seed)
    dims = chance.choice([(), (0,), (2,), (1, 2)])
    lists = Lists(size=chance.randint(0, 4), lengths=(), is_batched=chance.random() < 0.6)
    lengths = [chance.randint(0, lists.size) for _ in range(chance.randint(1, 3) if lists.is_batched else 1)]
    lists = Lists(lists.size, lengths, lists.is_batched)

    def values() -> bytes:
        if datatype == "BYTES":
            texts = [chance.choice([b"", b"x", b"\x00\xff", b"long" * 5]) for _ in range(int(np.prod(dims)))]
            return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        return chance.randbytes(int(np.prod(dims)) * ITEMSIZE_BYTES[datatype])

    filling = bytes(int(np.prod(dims)) * (4 if datatype == "BYTES" else ITEMSIZE_BYTES[datatype]))
    table = [[values() for _ in range(lists.size)] for _ in lengths]
    flat = [row for own, length in zip(table, lengths, strict=True) for row in own[:length]]
    rows = Rows(WireTensor(datatype, (*lists.shape, *dims), b"".join(b"".join(own) for own in table)), lists)
    parts, start = [], 0
    while start < len(flat):
        stop = min(len(flat), start + chance.randint(1, 3))
        parts.append(rows.part(start, stop, is_batched=True))
        assert (b"".join(flat[start:stop]), (stop - start, *(dims or (1,)))) == (bytes(parts[-1].data), parts[-1].shape)
        start = stop
    if parts:
        padded = [
            row if i < length else filling
            for own, length in zip(table, lengths, strict=True)
            for i, row in enumerate(own)
        ]
        whole = stacked(parts, lists)
        assert (b"".join(padded), (*lists.shape, *(dims or (1,)))) == (bytes(whole.data), whole.shape)
