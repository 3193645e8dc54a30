"""The table of samples in the README: ``python -m tests.compat.graphs.index`` writes it anew."""

import re
from collections.abc import Iterator

from tests.compat.graphs.all_shapes import SHAPES
from tests.compat.graphs.shape import FOLDER, Shape

README = FOLDER / "README.md"
_HEAD = "| file | what shape it is | of | here |\n|---|---|---|---|\n"


def table() -> str:
    """One row for each sample."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for shape in SHAPES:
        originals = shape.source.replace("triton-inference-server/", "")
        yield f"| `{shape.file}` | {shape.about} | {originals} | {_status(shape)} |\n"


def _status(shape: Shape) -> str:
    if shape.refused:
        return f"refused: {shape.refused}"
    return "runs, marked `# CHECK`" if shape.check else "runs"


if __name__ == "__main__":
    written = re.sub(re.escape(_HEAD) + r"(\|.*\n)*", lambda _: table(), README.read_text())
    README.write_text(written)
