"""The model to optimise, the graphs that call it, and a staged repository with one version of it."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx

from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.repository.layout import CONFIG_FILENAME, folders_of_models, is_model_folder, versions_to_serve
from weft.base.text.pbtxt import parse, suggestion
from weft.base.text.pbtxt_writer import text_of
from weft.language import GraphPlan
from weft.language.plan import CallPlan, steps_of
from weft.optimize.methods.method import SourceModel
from weft.router.repository.files import GraphRepository
from weft.serving.lifecycle.repository import ModelRepository, check_name
from weft.tools.offline import BACKENDS, GRAPH_FOLDER, define_offline, load_plan, stage
from weft_protos.model_config_pb2 import ModelConfig

#: The model file of a version folder by backend, where ``default_model_filename`` names no other.
_MODEL_FILES: Mapping[str, str] = {"onnxruntime": "model.onnx", "pytorch": "model.pt2"}


@dataclass(frozen=True)
class RepositoryModel:
    """A version of a model in a repository.

    Attributes:
        source: The version, as methods take it.
        versions: Numbers of all version folders, ascending.
        service: Name of the folder of models that it is in, for example ``model``; "" if models lie side by side.
        text: Current text of ``config.pbtxt``.
    """

    source: SourceModel
    version: int
    versions: Sequence[int]
    service: str
    repository: Path
    text: str

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.source.folder.parent

    def serves(self, versions: Sequence[int]) -> list[int]:
        """The ones of these versions that ``version_policy`` serves, ascending."""
        return versions_to_serve(self.source.config.version_policy, versions)


def find_model(repository: Path, name: str, version: int | None = None) -> RepositoryModel:
    """Find a model, and check that it can be optimised.

    Args:
        repository: Folder with the services' folders, or with models side by side.
        version: None: the highest that is served.

    Raises:
        NotFoundError: There is no such repository, model or version.
        InvalidArgumentError: The configuration is missing or wrong, or there are no methods for its backend.
        OSError: A file cannot be read.
    """
    if not repository.is_dir():
        raise NotFoundError(f"no such folder: {repository}; --repository names the model repository")
    check_name(name)
    folders = folders_of_models(repository, tuple(BACKENDS)) or {"": repository}
    service = next((service for service, folder in folders.items() if is_model_folder(folder / name)), None)
    if service is None:
        known = [name for folder in folders.values() for name in ModelRepository(folder).names()]
        is_graph = (repository / GRAPH_FOLDER / name).is_dir()
        hint = "; a graph has that name: give one of the models that it calls" if is_graph else suggestion(name, known)
        raise NotFoundError(f"'{repository}' has no model '{name}'{hint}")
    folder = folders[service] / name
    config_file = folder / CONFIG_FILENAME
    if not config_file.is_file():
        raise InvalidArgumentError(
            f"'{name}' has no {CONFIG_FILENAME}, where the origin of the new version is to be noted; write one with "
            "name, backend, inputs and outputs"
        )
    define_offline(config_file)  # raises what is wrong with it
    text = config_file.read_bytes().decode()
    config, _ = parse(text, ModelConfig(), file=str(config_file))
    versions = ModelRepository(folders[service]).versions(name)
    served = versions_to_serve(config.version_policy, versions)
    chosen = max(served, default=0) if version is None else version
    if chosen not in versions:
        raise NotFoundError(
            f"'{name}' has no version {chosen or 'that is served'}; it has {', '.join(map(str, versions)) or 'none'}"
        )
    backend = config.backend or config.platform.partition("_")[0]
    filename = config.default_model_filename or _MODEL_FILES.get(backend, "")
    if not filename:
        raise InvalidArgumentError(
            f"'{name}' runs on the backend '{backend}'; there are methods for {' and '.join(_MODEL_FILES)}. "
            "`weft quantize` makes language models smaller"
        )
    file = folder / str(chosen) / filename
    if not file.is_file():
        raise NotFoundError(f"'{name}' has no file {chosen}/{filename}; `make models` builds those of the samples")
    source = SourceModel(name, folder / str(chosen), config, file)
    return RepositoryModel(source, chosen, versions, service, repository, text)


def model_files(source: SourceModel) -> list[Path]:
    """The model file, and the files beside it that hold its weights."""
    if source.file.suffix != ".onnx":
        return [source.file]
    try:
        model = onnx.load(source.file, load_external_data=False)
    except Exception as error:  # of protobuf
        raise InvalidArgumentError(f"{source.file} cannot be read as an ONNX model: {error}") from None
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return [source.file, *(source.folder / location for location in sorted(locations))]


def sha256_of(file: Path) -> str:
    """sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class GraphUse(NamedTuple):
    """A graph that calls the model, and the versions of the model that its steps name."""

    name: str
    versions: frozenset[int]


def graphs_that_call(repository: Path, name: str) -> list[GraphUse]:
    """The graphs of a repository, their latest versions, that call a model. Graphs with errors are left out."""
    found = []
    folder = repository / GRAPH_FOLDER
    for graph in sorted(GraphRepository(folder if folder.is_dir() else repository).scan()):
        try:
            plan = load_plan(graph, repository)
        except (WeftError, OSError):
            continue
        calls = [step.action for _, step in steps_of(plan.root) if isinstance(step.action, CallPlan)]
        own = [call.model_version for call in calls if call.model_name == name]
        if own or any(model == name for _, model in plan.dependencies):
            found.append(GraphUse(graph, frozenset(int(version) for version in own if version)))
    return found


def choose_graph(asked: str, model: RepositoryModel, uses: Sequence[GraphUse]) -> GraphPlan | None:
    """The graph that the data goes through; None: straight to the model.

    Args:
        asked: NAME or NAME/VERSION; "": the only one that calls the model, none if no graph does; the model's own name:
            none.
        uses: The graphs that call the model.

    Raises:
        InvalidArgumentError: Several call it and none is chosen, or the chosen one does not.
        WeftError: The graph cannot be compiled.
    """
    name = model.source.name
    known = [use.name for use in uses]
    if asked == name or (not asked and not known):
        return None
    if not asked and len(known) > 1:
        raise InvalidArgumentError(
            f"the graphs {', '.join(known)} call '{name}'; --graph names the one that the data is for, or --graph "
            f"{name} for data that goes straight to the model"
        )
    plan = load_plan(asked or known[0], model.repository)
    if plan.signature.name not in known:
        raise InvalidArgumentError(
            f"graph '{asked}' does not call '{name}'; graphs that do: {', '.join(known) or 'none'}"
        )
    return plan


def check_pinned(model: RepositoryModel, number: int, uses: Sequence[GraphUse]) -> None:
    """Reject a new version that would displace one that a graph names.

    Raises:
        InvalidArgumentError: A graph names a version that ``version_policy`` would no longer serve.
    """
    gone = {*model.serves(model.versions)} - {*model.serves([*model.versions, number])}
    for use in uses:
        if asked := sorted(use.versions & gone):
            raise InvalidArgumentError(
                f"graph '{use.name}' asks for version {asked[0]} of '{model.source.name}', which would no longer be "
                f"served beside a version {number}; put version_policy {{ all {{ }} }} into its config.pbtxt first"
            )


def staged_config(model: RepositoryModel, parameters: Mapping[str, str]) -> ModelConfig:
    """The model's configuration, with more parameters, for a folder with only the one version."""
    config = ModelConfig()
    config.CopyFrom(model.source.config)
    del config.version_policy.specific.versions[:]
    config.version_policy.specific.versions.append(model.version)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def alone(config: ModelConfig) -> ModelConfig:
    """A configuration for measuring a model alone: one instance, no response cache, no batching delay."""
    bare = ModelConfig()
    bare.CopyFrom(config)
    for group in bare.instance_group:
        group.count = 1
    bare.ClearField("response_cache")
    bare.ClearField("model_warmup")
    if bare.HasField("dynamic_batching"):
        bare.dynamic_batching.ClearField("max_queue_delay_microseconds")
        bare.dynamic_batching.ClearField("preferred_batch_size")
    return bare


def stage_version(
    folder: Path, model: RepositoryModel, version_folder: Path, config: ModelConfig, *, plan: GraphPlan | None
) -> Path:
    """Make a repository, ``folder``, in which ``version_folder`` is the only version of the model.

    It gets the number of the original version, so that graphs that name it find it. Everything else is a link: the
    graph, the graphs inside it, and the models that they call; none if the plan is None. If one of these models runs
    its own code, which may call any other, all are included.

    Raises:
        OSError: A link cannot be made.
    """
    own_folders = folders_of_models(model.repository, (*BACKENDS, GRAPH_FOLDER)) or {"": model.repository}
    services = {service: path for service, path in own_folders.items() if service != GRAPH_FOLDER}
    own = Path(model.service, model.source.name)
    wanted: Collection[str] = set() if plan is None else {name for _, name in plan.dependencies}
    if any(any((path / name).glob("*/model.py")) for path in services.values() for name in wanted):
        wanted = {entry.name for path in services.values() for entry in path.iterdir()}
    folders = [own]  # a service without models need not start
    for service, path in services.items():
        folders += [Path(service, name) for name in sorted(wanted) if is_model_folder(path / name)]
    if plan is not None:
        nested = {node.graph.partition("/")[0] for node, _ in steps_of(plan.root) if node.graph}
        graphs = Path(GRAPH_FOLDER if model.service else "")
        names = sorted({plan.signature.name, *nested})
        folders += [graphs / name for name in names if (model.repository / graphs / name).is_dir()]
    replaced: dict[Path, str | Path | None] = {own / str(version): None for version in model.versions}
    replaced[own / str(model.version)] = version_folder
    replaced[own / CONFIG_FILENAME] = text_of(config)
    return stage(model.repository, folders, replaced, folder)
