"""Identity of cached blocks: a keyed hash of a block's tokens and of everything before them."""

import time
from array import array
from collections.abc import Callable, Mapping
from hashlib import blake2b

_DIGEST_BYTES = 16
#: Blocks hashed before other threads may have the interpreter: 80 us.
_NUM_SLICE_BLOCKS = 64


class BlockHasher:
    """Chain hashes, on any thread: BLAKE2b, 128 bits, keyed, over the parent's hash and the block's tokens.

    Equal hashes mean equal KV, so the hash covers everything that KV depends on: all preceding tokens, the tenant's
    salt, and the fields that identify the model. The secret key prevents clients, who choose the tokens, from
    constructing collisions.

    Args:
        key: Secret, up to 64 bytes; one per process is enough.
        block_size: Tokens of a block.
        fields: What else KV depends on, such as the model, an adapter, the dtype of the cache. Each name and value is
            hashed with its length, so that no value can imitate another field.
    """

    def __init__(self, key: bytes, block_size: int, fields: Mapping[str, str]) -> None:
        self._block_size = block_size
        self._block = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"block")
        self._root = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"root")
        for name, value in sorted(fields.items()):
            for text in (name.encode(), value.encode()):
                self._root.update(len(text).to_bytes(8, "little") + text)

    def root(self, salt: bytes) -> bytes:
        """Parent of the first block of every sequence with this salt."""
        root = self._root.copy()
        root.update(salt)  # needs no length, because nothing follows it
        return root.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: "array[int]", num_blocks: int) -> None:
        """Append to ``hashes`` until it has those of the first ``num_blocks`` blocks of ``tokens``."""
        block_size, keyed = self._block_size, self._block
        parent = hashes[-1] if hashes else root
        for index in range(len(hashes), num_blocks):
            block = keyed.copy()
            block.update(parent + tokens[index * block_size : (index + 1) * block_size].tobytes())
            parent = block.digest()
            hashes.append(parent)

    def prompt(self, salt: bytes, tokens: "array[int]", is_stopped: Callable[[], bool]) -> list[bytes]:
        """Hashes of the full blocks of a prompt, computed beside other threads: none waits for more than a slice.

        Args:
            salt: See ``root``.
            tokens: The prompt.
            is_stopped: Asked between slices; once true, the hashes so far are returned.
        """
        hashes: list[bytes] = []
        root = self.root(salt)
        num_blocks = len(tokens) // self._block_size
        for end in range(_NUM_SLICE_BLOCKS, num_blocks, _NUM_SLICE_BLOCKS):
            if is_stopped():
                return hashes
            self.extend(hashes, root, tokens, end)
            time.sleep(0)
        if not is_stopped():
            self.extend(hashes, root, tokens, num_blocks)
        return hashes
