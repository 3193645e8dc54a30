"""What the files of a version are: a digest, by which two versions under one configuration are told apart."""

import hashlib
import stat
from pathlib import Path

#: Written when a model.py is imported.
_SKIPPED = "__pycache__"
_PIECE_BYTES = 1 << 16
#: Pieces of a file that are read; a longer one is read in as many, at equal distances, the first and last among them.
_NUM_PIECES = 64


def version_digest(folder: Path) -> str:
    """sha256 over names, sizes and content of the files of a version, without hidden ones.

    Of a file above 4 MiB so much is read, over its whole length: other weights differ nearly everywhere, and a digest
    of all of them would take as long as they take to load. Blocks: reads the disk.

    Args:
        folder: Of the version; files that cannot be read count by their names.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if _SKIPPED in parts or any(part.startswith(".") for part in parts):
            continue
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                continue
            name = "/".join(parts).encode("utf-8", "surrogateescape")
            digest.update(f"{len(name)} {found.st_size} ".encode() + name)
            with path.open("rb") as file:
                for start in _starts(found.st_size):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
        except OSError:  # gone meanwhile, or not for this process: its backend says what is wrong, if anything
            continue
    return digest.hexdigest()


def _starts(num_bytes: int) -> list[int]:
    """Where the pieces begin."""
    if num_bytes <= _NUM_PIECES * _PIECE_BYTES:
        return list(range(0, num_bytes, _PIECE_BYTES))
    last = num_bytes - _PIECE_BYTES
    return [last * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)]
