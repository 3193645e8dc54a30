"""A repository for one trial: links to the user's files, and the configurations that differ as files of its own."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from weft_capacity.tuning.graph_models import TunedGraph
from weft_common.repository.layout import CONFIG_FILENAME
from weft_tools.offline import GRAPH_FOLDER


def stage(graph: TunedGraph, texts: Mapping[str, str], folder: Path) -> Path:
    """Make the repository in ``folder``, which is emptied first; what ``graph`` does not need is left out.

    Args:
        graph: Its files are linked to and never written.
        texts: Content of the ``config.pbtxt`` of each model that differs, by model.
        folder: Where.

    Raises:
        OSError: It cannot be written.
    """
    if folder.exists():
        shutil.rmtree(folder)
    if any(len(relative.parts) > 1 for relative in graph.folders):  # else models lie side by side
        (folder / GRAPH_FOLDER).mkdir(parents=True)
    for relative in graph.folders:
        target = folder / relative
        target.mkdir(parents=True, exist_ok=True)
        for entry in (graph.repository / relative).resolve().iterdir():
            if entry.name.startswith("."):
                continue
            is_changed = entry.name == CONFIG_FILENAME and relative.name in texts and _is_model(graph, relative)
            if not is_changed:
                os.symlink(entry, target / entry.name)
        if relative.name in texts and _is_model(graph, relative):
            (target / CONFIG_FILENAME).write_text(texts[relative.name])
    return folder


def _is_model(graph: TunedGraph, relative: Path) -> bool:
    """Whether the folder is a model's: a graph may have the same name."""
    model = graph.models.get(relative.name)
    return model is not None and model.folder == graph.repository / relative
