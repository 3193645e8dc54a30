"""The models that a graph calls, and their files: read, staged for a trial, and written with the pick."""

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.repository.layout import CONFIG_FILENAME, runs_in_router
from weft.base.text.pbtxt import parse
from weft.base.text.suggestion import suggestion
from weft.capacity.tuning.space import TunedModel
from weft.jobs.atomic_files import replace_file
from weft.language.plan import CallPlan, GraphPlan, steps_of
from weft.tools.offline import BACKENDS, GRAPH_FOLDER, load_plan, model_folders, stage
from weft_protos.model_config_pb2 import ModelConfig

#: In a ``model.py`` that calls other models.
_CALLS = "InferenceRequest"
_SAVED = ".before-tune"


@dataclass(frozen=True)
class TunedGraph:
    """A graph, or a single model, with everything that it needs.

    Attributes:
        models: Models that it can call, by name.
        folders: Folders of graphs and models to serve it from, relative to the repository.
    """

    name: str
    repository: Path
    models: Mapping[str, TunedModel]
    folders: tuple[Path, ...]


def read_graph(name: str, repository: Path) -> TunedGraph:
    """Find the graph, NAME/VERSION for one version, or the model of that name.

    A Python model may call any other, so with one that makes calls all models of the repository are served.

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
    if plain in {folder.name for folder in _graph_folders(repository)}:
        graphs, batch_sizes = _reached(load_plan(name, repository))
        graphs.add(plain)
        for folder in _graph_folders(repository):  # the rows that any other graph may send to the same models
            with contextlib.suppress(WeftError):  # a graph with errors is not served
                for model, most in _reached(load_plan(folder.name, repository))[1].items():
                    if model in batch_sizes:
                        batch_sizes[model] = max(batch_sizes[model], most)
    elif plain in known:
        batch_sizes[plain] = _config(known[plain][1])[1].max_batch_size
    else:
        graph_names = [folder.name for folder in _graph_folders(repository)]
        raise NotFoundError(
            f"'{repository}' has no graph or model '{plain}'{suggestion(plain, [*graph_names, *known])}"
        )
    if missing := [model for model in batch_sizes if model not in known]:
        raise NotFoundError(f"'{name}' calls the model '{missing[0]}', which '{repository}' does not have")
    files = (file for model in batch_sizes for file in known[model][1].glob("*/*.py"))
    if any(_CALLS in file.read_text(errors="replace") for file in files):
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


def _reached(plan: GraphPlan) -> tuple[set[str], dict[str, int]]:
    """Names of nested graphs, and the rows per call of each called model."""
    rows = plan.signature.max_batch_size
    steps = list(steps_of(plan.root))
    graphs = {node.graph.partition("/")[0] for node, _ in steps if node.graph}
    calls = [step.action for _, step in steps if isinstance(step.action, CallPlan)]
    return graphs, {call.model_name: min(rows, call.signature.max_batch_size) for call in calls}


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


def stage_graph(graph: TunedGraph, texts: Mapping[str, str], folder: Path) -> Path:
    """Make a repository of links in ``folder``, which is emptied first, with what ``graph`` needs. Raises OSError.

    ``texts`` has the ``config.pbtxt`` of each model that differs, by model.
    """
    places = {name: graph.models[name].folder.relative_to(graph.repository) / CONFIG_FILENAME for name in texts}
    replaced = {place: texts[name] for name, place in places.items()}
    return stage(graph.repository, graph.folders, replaced, folder)


def restage(graph: TunedGraph, model: str, text: str | None, folder: Path) -> None:
    """Replace a model's ``config.pbtxt`` in a staged repository; None: the user's. Raises OSError."""
    source = graph.models[model].folder
    path = folder / source.relative_to(graph.repository) / CONFIG_FILENAME
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    elif (source / CONFIG_FILENAME).exists():
        path.symlink_to((source / CONFIG_FILENAME).resolve())


def write_in_place(graph: TunedGraph, texts: Mapping[str, str]) -> list[Path]:
    """Replace configurations by model, and return their files; backups stay beside them.

    Raises:
        InvalidArgumentError: A file has changed since the search began; nothing is written.
        OSError: A file cannot be written; all are unchanged.
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
    """Copy the whole repository to ``output`` with the new configurations, atomically.

    Raises:
        InvalidArgumentError: ``output`` exists.
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
    """Check that a copy of the repository can be created there. Raises InvalidArgumentError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidArgumentError(f"--output '{output}' exists; name a new folder")
    if output.resolve().is_relative_to(repository.resolve()):
        raise InvalidArgumentError(f"--output '{output}' is inside the repository; name a folder outside of it")


def _save(path: Path, text: str) -> None:
    """Back up the content beside the file; an existing backup stays."""
    number = 1
    saved = path.with_name(path.name + _SAVED)
    while saved.exists() and saved.read_text() != text:
        number += 1
        saved = path.with_name(f"{path.name}{_SAVED}-{number}")
    replace_file(saved, text.encode())
