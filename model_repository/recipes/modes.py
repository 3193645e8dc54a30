"""Modes of built files."""

import os
import stat
from pathlib import Path

from recipes.recipe import Recipe


def let_others_read(repository: Path, recipe: Recipe) -> None:
    """The outputs have the mode of any new file: services in containers read them as another user.

    safetensors writes files that their owner alone can read.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    for output in recipe.outputs:
        path = repository / output
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o666 & ~umask))
