"""A repository made of links to parts of another, with some files in place of others."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.tools.offline import GRAPH_FOLDER


def stage(repository: Path, folders: Iterable[Path], replaced: Mapping[Path, str | Path | None], target: Path) -> Path:
    """Make a repository in ``target``, which is emptied first.

    Args:
        repository: Its files are linked to and never written.
        folders: Those of models and graphs that the new one has, relative to the repository.
        replaced: What is in the place of an entry of these folders, by its path relative to the repository: text, a
            file or folder to link to, or None for nothing.

    Returns:
        ``target``.

    Raises:
        OSError: A folder cannot be read, or ``target`` written.
    """
    if target.exists():
        shutil.rmtree(target)
    wanted = list(dict.fromkeys(folders))
    if any(len(relative.parts) > 1 for relative in wanted):  # else models lie side by side
        (target / GRAPH_FOLDER).mkdir(parents=True)
    for relative in wanted:
        (target / relative).mkdir(parents=True, exist_ok=True)
        for entry in (repository / relative).resolve().iterdir():
            if relative / entry.name not in replaced and not entry.name.startswith("."):
                (target / relative / entry.name).symlink_to(entry)
    for place, content in replaced.items():
        if isinstance(content, str):
            (target / place).write_text(content)
        elif content is not None:
            (target / place).symlink_to(content.resolve())
    return target
