"""Files of repositories: one staged for a trial; the pick in the user's, all or nothing, or in a copy of it."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.capacity.tuning.graph_models import TunedGraph
from weft.jobs.atomic_files import replace_file
from weft.tools.staging import stage

_SAVED = ".before-tune"


def stage_graph(graph: TunedGraph, texts: Mapping[str, str], folder: Path) -> Path:
    """Make the repository in ``folder``, which is emptied first; what ``graph`` does not need is left out.

    Args:
        graph: Its files are linked to and never written.
        texts: Content of the ``config.pbtxt`` of each model that differs, by model.
        folder: Where.

    Raises:
        OSError: It cannot be written.
    """
    places = {name: graph.models[name].folder.relative_to(graph.repository) / CONFIG_FILENAME for name in texts}
    replaced = {place: texts[name] for name, place in places.items()}
    return stage(graph.repository, graph.folders, replaced, folder)


def restage(graph: TunedGraph, model: str, text: str | None, folder: Path) -> None:
    """Give a model of a staged repository another ``config.pbtxt``; None: the user's. Raises OSError."""
    source = graph.models[model].folder
    path = folder / source.relative_to(graph.repository) / CONFIG_FILENAME
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    elif (source / CONFIG_FILENAME).exists():
        path.symlink_to((source / CONFIG_FILENAME).resolve())


def write_in_place(graph: TunedGraph, texts: Mapping[str, str]) -> list[Path]:
    """Replace configurations; what they were stands beside each as ``config.pbtxt.before-tune``.

    Args:
        graph: Whose repository is written.
        texts: New content by model.

    Returns:
        The files that were replaced.

    Raises:
        InvalidArgumentError: A file is not what it was when the search began; nothing is written.
        OSError: A file cannot be written; all are what they were.
    """
    paths = {name: (graph.models[name].folder / CONFIG_FILENAME).resolve() for name in texts}
    for name, path in paths.items():
        if path.exists() and path.read_text() != graph.models[name].text:
            raise InvalidArgumentError(f"'{path}' was changed since the search began; nothing was written: tune again")
    for name, path in paths.items():
        _save(path, graph.models[name].text)
    replaced: list[Path] = []
    try:
        for name, path in paths.items():
            replace_file(path, texts[name].encode())
            replaced.append(path)
    except BaseException:
        for name, path in paths.items():
            if path in replaced:
                replace_file(path, graph.models[name].text.encode())
        raise
    return replaced


def write_copy(graph: TunedGraph, texts: Mapping[str, str], output: Path) -> list[Path]:
    """Copy the whole repository to ``output`` with the new configurations; it is there complete, or not at all.

    Raises:
        InvalidArgumentError: There is something at ``output``.
        OSError: It cannot be written.
    """
    check_output(output, graph.repository)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        repository = temporary / output.name
        shutil.copytree(graph.repository, repository, ignore=shutil.ignore_patterns("__pycache__"))
        written = []
        for name, text in texts.items():
            relative = graph.models[name].folder.relative_to(graph.repository) / CONFIG_FILENAME
            (repository / relative).write_text(text)
            written.append(output / relative)
        repository.replace(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return written


def check_output(output: Path, repository: Path) -> None:
    """Check that a copy of the repository can be made there. Raises InvalidArgumentError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidArgumentError(f"--output '{output}' exists; name a new folder")
    if output.resolve().is_relative_to(repository.resolve()):
        raise InvalidArgumentError(f"--output '{output}' is inside the repository; name a folder outside of it")


def _save(path: Path, text: str) -> None:
    """Keep the content beside the file; another one that was kept before stays."""
    number = 1
    saved = path.with_name(path.name + _SAVED)
    while saved.exists() and saved.read_text() != text:
        number += 1
        saved = path.with_name(f"{path.name}{_SAVED}-{number}")
    replace_file(saved, text.encode())
