"""What keys and values depend on, as text: equal in two processes only where these compute the same."""

import os
from hashlib import blake2b
from pathlib import Path

from weft import __version__
from weft.llm.config import EngineConfig, TransformerConfig

_SUFFIXES = (".safetensors", ".gguf")
#: Of each part of a file its first bytes are read: 64 MiB of a model of 16 GiB, and small files whole.
_PART_BYTES, _READ_BYTES = 1 << 20, 4 << 10
_WHOLE_BYTES = 64 << 20


def weights_digest(folder: Path) -> str:
    """Digest of the weight files of a folder: names, sizes, and pieces from all over each; below 64 MiB all of it.

    Pieces are so dense that a changed matrix of 1 MiB cannot go unseen, and take a hundredth of the time of a load.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{len(path.name)} {path.name} {size} ".encode())
            part_bytes, read_bytes = (_READ_BYTES,) * 2 if size <= _WHOLE_BYTES else (_PART_BYTES, _READ_BYTES)
            for start in range(0, size, part_bytes):
                digest.update(os.pread(file.fileno(), read_bytes, start))
    return digest.hexdigest()


def block_fields(config: EngineConfig, model: TransformerConfig, weights: str) -> dict[str, str]:
    """The ``fields`` of a ``BlockHasher``.

    Args:
        config: Resolved for the model.
        weights: ``weights_digest``, or what random weights were made from.
    """
    is_by_length = any(rope["rope_type"] == "longrope" for rope in model.ropes)
    return {
        "version": __version__,  # the layout of a block is that of the program
        "model": repr(model),
        "weights": weights,
        "device": config.device.partition(":")[0],
        "max_model_len": str(config.max_model_len) if is_by_length else "",
        **{
            name: str(getattr(config, name))
            for name in ("block_size", "deterministic", "dtype", "kv_dtype", "quantization")
        },
    }
