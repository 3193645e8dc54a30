"""The models that a graph calls, with the files that are needed to serve it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import NotFoundError, WeftError
from weft.base.repository.layout import CONFIG_FILENAME, runs_in_router
from weft.base.text.pbtxt import parse
from weft.base.text.suggestion import suggestion
from weft.capacity.tuning.settings import TunedModel
from weft.language.plan import CallPlan, GraphPlan
from weft.router.repository.serving import steps_of
from weft.tools.compiled import load_plan
from weft.tools.offline import BACKENDS, GRAPH_FOLDER, model_folders
from weft_protos.model_config_pb2 import ModelConfig

#: In a ``model.py`` that calls other models.
_CALLS = "InferenceRequest"


@dataclass(frozen=True)
class TunedGraph:
    """A graph, or a single model, and what it needs.

    Attributes:
        name: Of the graph or model.
        repository: Where it is.
        models: Those that it can call, by name.
        folders: Folders of the repository to serve it from, relative to it: of graphs and of models.
    """

    name: str
    repository: Path
    models: Mapping[str, TunedModel]
    folders: tuple[Path, ...]


def read_graph(name: str, repository: Path) -> TunedGraph:
    """The graph of that name, NAME/VERSION for one version, or the model.

    A Python model may call any other, so with one that calls some all models of the repository are served.

    Raises:
        NotFoundError: There is no such graph, model or repository.
        GraphError, PbtxtError: A file has errors.
        OSError: A file cannot be read.
    """
    if not repository.is_dir():
        raise NotFoundError(f"no such folder: '{repository}'; --repository DIR names the model repository")
    known = model_folders(repository)
    plain = name.partition("/")[0]
    graphs: set[str] = set()
    batch_sizes: dict[str, int] = {}
    if _has_graph(plain, repository):
        graphs, batch_sizes = _reached(load_plan(name, repository))
        graphs.add(plain)
        _raise_to_others(batch_sizes, repository)
    elif plain in known:
        batch_sizes[plain] = _config(known[plain][1])[1].max_batch_size
    else:
        graph_names = [folder.name for folder in _graph_folders(repository)]
        raise NotFoundError(
            f"'{repository}' has no graph or model '{plain}'{suggestion(plain, [*graph_names, *known])}"
        )
    if missing := [model for model in batch_sizes if model not in known]:
        raise NotFoundError(f"'{name}' calls the model '{missing[0]}', which '{repository}' does not have")
    if any(_calls_others(known[model][1]) for model in batch_sizes):
        batch_sizes = {model: batch_sizes.get(model, 1 << 30) for model in known}
        graphs |= {folder.name for folder in _graph_folders(repository)}
    models = {model: _model(*known[model], min_batch_size=rows) for model, rows in batch_sizes.items()}
    folders = [known[model][1].relative_to(repository) for model in models]
    folders += [folder.relative_to(repository) for folder in _graph_folders(repository) if folder.name in graphs]
    return TunedGraph(name, repository, models, tuple(folders))


def _graph_folders(repository: Path) -> list[Path]:
    folder = repository / GRAPH_FOLDER
    if folder.is_dir():
        return [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    configs = sorted(repository.glob(f"*/{CONFIG_FILENAME}"))
    return [config.parent for config in configs if runs_in_router(config)]


def _has_graph(name: str, repository: Path) -> bool:
    return any(folder.name == name for folder in _graph_folders(repository))


def _reached(plan: GraphPlan) -> tuple[set[str], dict[str, int]]:
    """Names of nested graphs, and for each model that is called the rows that a call may have."""
    rows = plan.signature.max_batch_size
    steps = list(steps_of(plan.root))
    graphs = {node.graph.partition("/")[0] for node, _ in steps if node.graph}
    calls = [step.action for _, step in steps if isinstance(step.action, CallPlan)]
    return graphs, {call.model_name: min(rows, call.signature.max_batch_size) for call in calls}


def _raise_to_others(rows: dict[str, int], repository: Path) -> None:
    """The rows that any other graph of the repository may send to the same models."""
    for folder in _graph_folders(repository):
        with contextlib.suppress(WeftError):  # a graph with errors is not served
            for model, most in _reached(load_plan(folder.name, repository))[1].items():
                if model in rows:
                    rows[model] = max(rows[model], most)


def _config(folder: Path) -> tuple[str, ModelConfig]:
    path = folder / CONFIG_FILENAME
    text = path.read_text() if path.is_file() else ""
    return text, parse(text, ModelConfig(), file=str(path))[0]


def _model(service: str, folder: Path, *, min_batch_size: int) -> TunedModel:
    text, config = _config(folder)
    backends = BACKENDS[service]
    modes = backends[config.backend].execution_modes if config.backend in backends else ()
    rows = min(min_batch_size, config.max_batch_size)
    return TunedModel(folder.name, service, folder, text, config, modes, rows)


def _calls_others(folder: Path) -> bool:
    return any(_CALLS in file.read_text(errors="replace") for file in folder.glob("*/*.py"))
