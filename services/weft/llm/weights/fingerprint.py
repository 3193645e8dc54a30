"""Fingerprint of a model's folder: what trained parts of a model name as the model that they belong to."""

from hashlib import blake2b
from pathlib import Path

from weft.base.errors import NotFoundError

_SUFFIXES = (".safetensors", ".gguf")
_NUM_CHUNKS = 256
_CHUNK_BYTES = 1 << 16


def fingerprint(folder: Path) -> str:
    """Digest of the weights of a folder, 32 hexadecimal digits; equal for copies, whatever the files' names.

    Of files above 16 MiB, 256 evenly spaced chunks of 64 KiB are read, so that it takes milliseconds: training, however
    short, changes every weight of a matrix. ``config.json`` does not count.

    Args:
        folder: A Hugging Face folder.

    Raises:
        NotFoundError: The folder is missing or has no file with weights.
        OSError: A file cannot be read.
    """
    paths = [path for path in folder.iterdir() if path.suffix in _SUFFIXES] if folder.is_dir() else []
    if not paths:
        raise NotFoundError(f"no file with weights (*.safetensors, *.gguf) in {folder}; give the folder of a model")
    return blake2b(b"".join(sorted(map(_digest, paths))), digest_size=16).hexdigest()


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    found = blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        if size <= _NUM_CHUNKS * _CHUNK_BYTES:
            found.update(file.read())
        else:
            for number in range(_NUM_CHUNKS):
                file.seek(number * (size - _CHUNK_BYTES) // (_NUM_CHUNKS - 1))
                found.update(file.read(_CHUNK_BYTES))
    return found.digest()
