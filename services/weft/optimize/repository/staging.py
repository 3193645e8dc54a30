"""A repository for one version of a model, made of links: what a mesh serves while the version is judged."""

from collections.abc import Collection, Mapping
from pathlib import Path

from google.protobuf import text_format

from weft.base.repository.layout import CONFIG_FILENAME, folders_of_models, is_model_folder
from weft.language import GraphPlan
from weft.optimize.repository.graphs import nested_graphs
from weft.optimize.repository.source import RepositoryModel
from weft.tools.offline import BACKENDS, GRAPH_FOLDER
from weft.tools.staging import stage
from weft_protos.model_config_pb2 import ModelConfig


def staged_config(model: RepositoryModel, parameters: Mapping[str, str]) -> ModelConfig:
    """The model's configuration, with more parameters, for a folder that has the one version alone."""
    config = ModelConfig()
    config.CopyFrom(model.source.config)
    del config.version_policy.specific.versions[:]
    config.version_policy.specific.versions.append(model.version)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def stage_version(
    folder: Path, model: RepositoryModel, version_folder: Path, config: ModelConfig, *, plan: GraphPlan | None
) -> Path:
    """Make a repository in which ``version_folder`` is the only version of the model.

    It has the number of the original version, so that graphs that name it find it. Everything else is a link: the
    graph, the graphs inside it, and the models that they call. Where one of these runs code of its own, which may call
    any other, all models are there.

    Args:
        folder: Does not exist.
        model: The original.
        version_folder: Files of the version.
        config: Of the model, as ``staged_config`` gives it.
        plan: The graph; None: the model is served alone.

    Returns:
        The repository, ``folder``.

    Raises:
        OSError: A link cannot be made.
    """
    own_folders = folders_of_models(model.repository, (*BACKENDS, GRAPH_FOLDER)) or {"": model.repository}
    services = {service: path for service, path in own_folders.items() if service != GRAPH_FOLDER}
    own = Path(model.service, model.source.name)
    wanted = _wanted(plan, services)
    folders = [own]  # a service without models need not start
    for service, path in services.items():
        folders += [Path(service, name) for name in wanted if is_model_folder(path / name)]
    graphs = set() if plan is None else {plan.signature.name, *nested_graphs(plan)}
    graph_folder = Path(GRAPH_FOLDER if model.service else "")
    folders += [graph_folder / name for name in sorted(graphs) if (model.repository / graph_folder / name).is_dir()]
    replaced: dict[Path, str | Path | None] = {own / str(version): None for version in model.versions}
    replaced[own / str(model.version)] = version_folder
    replaced[own / CONFIG_FILENAME] = text_format.MessageToString(config, as_utf8=True)
    return stage(model.repository, folders, replaced, folder)


def _wanted(plan: GraphPlan | None, services: Mapping[str, Path]) -> Collection[str]:
    names = set() if plan is None else {name for _, name in plan.dependencies}
    if any(_runs_code(folder / name) for folder in services.values() for name in names):
        return sorted({entry.name for folder in services.values() for entry in folder.iterdir()})
    return sorted(names)


def _runs_code(folder: Path) -> bool:
    return any(folder.glob("*/model.py"))


def alone(config: ModelConfig) -> ModelConfig:
    """A configuration for measuring a model: one instance, no cached answers, no waiting for a fuller batch."""
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
