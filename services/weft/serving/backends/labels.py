"""Files with the names of classes."""

from pathlib import Path

from weft.serving.backends.loading import existing_file


def read_label_file(directory: Path, filename: str) -> tuple[Path, list[bytes]]:
    """The path of the file, and its lines, one label each, as bytes of UTF-8.

    The model's folder comes first, as in Triton Inference Server, then the version's, for labels that change with it.

    Args:
        directory: The version folder.
        filename: Relative.

    Raises:
        InvalidArgumentError: ``filename`` leaves the folders.
        NotFoundError: Neither folder has it.
        OSError: It cannot be read.
    """
    path = existing_file(directory.parent, filename, parents=(directory,))
    return path, path.read_bytes().removesuffix(b"\n").replace(b"\r\n", b"\n").split(b"\n")
