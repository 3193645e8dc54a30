"""A repository for one version of a model, made of links: what a mesh serves while the version is judged."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from google.protobuf import text_format

from weft_common.repository.layout import CONFIG_FILENAME, folders_of_models, is_model_folder
from weft_common.versions import is_version
from weft_optimize.repository.graphs import nested_graphs
from weft_optimize.repository.source import RepositoryModel
from weft_protos.model_config_pb2 import ModelConfig
from weft_router.graph import GraphPlan
from weft_tools.offline import BACKENDS, GRAPH_FOLDER


def staged_config(model: RepositoryModel, parameters: Mapping[str, str]) -> ModelConfig:
    """The model's configuration, with more parameters, for a folder that has the one version alone."""
    config = ModelConfig()
    config.CopyFrom(model.source.config)
    del config.version_policy.specific.versions[:]
    config.version_policy.specific.versions.append(model.version)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def stage(
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
    wanted = _wanted(plan, services)
    for service, path in services.items():
        if names := [name for name in wanted if is_model_folder(path / name)]:  # an empty service need not start
            _link(path, folder / service, names, model)
    graphs = set() if plan is None else {plan.signature.name, *nested_graphs(plan)}
    graph_folder = own_folders.get(GRAPH_FOLDER, model.repository)
    _link(graph_folder, folder / (GRAPH_FOLDER if model.service else ""), sorted(graphs), model)
    own = folder / model.service / model.source.name
    own.mkdir(parents=True)
    for entry in model.folder.iterdir():
        if entry.name != CONFIG_FILENAME and not is_version(entry.name):
            (own / entry.name).symlink_to(entry.resolve())
    (own / CONFIG_FILENAME).write_text(text_format.MessageToString(config, as_utf8=True))
    (own / str(model.version)).symlink_to(version_folder.resolve())
    return folder


def _wanted(plan: GraphPlan | None, services: Mapping[str, Path]) -> Collection[str]:
    names = set() if plan is None else {name for _, name in plan.dependencies}
    if any(_runs_code(folder / name) for folder in services.values() for name in names):
        return sorted({entry.name for folder in services.values() for entry in folder.iterdir()})
    return sorted(names)


def _runs_code(folder: Path) -> bool:
    return any(folder.glob("*/model.py"))


def _link(source: Path, target: Path, names: Iterable[str], model: RepositoryModel) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if source / name != model.folder and not (target / name).exists() and os.path.isdir(source / name):
            (target / name).symlink_to((source / name).resolve())


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
