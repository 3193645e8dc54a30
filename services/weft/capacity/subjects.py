"""Reads the models to plan for from a repository's files."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.text.suggestion import suggestion
from weft.router.repository.files import GraphRepository
from weft.serving.backends.base import InstanceContext, ModelContext
from weft.tools.offline import GRAPH_FOLDER, define_offline, load_plan, model_folders


@dataclass(frozen=True)
class Subject:
    """A model version to plan for.

    Attributes:
        context: Signature, folder and parameters of the highest version that is served.
        num_instances: On all its devices together, from ``instance_group``.
        max_batch_size: Largest batch; 1 without a batch dimension.
        filename: Of the model file, "" for the backend's default.
    """

    name: str
    service: str
    backend: str
    context: ModelContext
    num_instances: int
    max_batch_size: int
    filename: str

    def instance(self, *, on_gpu: bool) -> InstanceContext:
        """An instance on a GPU or the CPU, for reading settings that depend on it."""
        return InstanceContext(f"{self.name}_0", "GPU" if on_gpu else "CPU", 0)


def find_subjects(repository: Path, names: Sequence[str]) -> list[Subject]:
    """The models of these names. Raises what ``find_models`` and ``read_subject`` do."""
    return [read_subject(*place) for place in find_models(repository, names).values()]


def find_models(repository: Path, names: Sequence[str]) -> dict[str, tuple[str, Path]]:
    """Service and folder of models by name: of those named, and of those called by named graphs.

    Without names, all models of the model service.

    Raises:
        NotFoundError: A name is that of no model or graph; or there is no repository, or no model in it.
        WeftError: A graph has errors.
    """
    if not repository.is_dir():
        raise NotFoundError(f"there is no folder {repository}; give the model repository with --repository")
    found = model_folders(repository)
    names = names or [name for name, (service, _) in found.items() if service == "model"]
    if not names:
        raise NotFoundError(f"{repository} has no model; give the model repository with --repository")
    folder = repository / GRAPH_FOLDER
    called: list[str] = []
    for name in names:
        if name in found:
            called.append(name)
            continue
        graphs = GraphRepository(folder).scan() if folder.is_dir() else {}
        if name.partition("/")[0] not in graphs:
            raise NotFoundError(
                f"there is no model or graph '{name}' in {repository}{suggestion(name, [*found, *graphs])}"
            )
        models = sorted({model for _, model in load_plan(name, repository).dependencies})
        if missing := [model for model in models if model not in found]:
            raise NotFoundError(f"graph '{name}' calls '{missing[0]}', which is no model of {repository}")
        called += models
    return {name: found[name] for name in called}


def read_subject(service: str, folder: Path) -> Subject:
    """Read a model from its files.

    Raises:
        WeftError: Its configuration is wrong, or there is no version.
        OSError: A file cannot be read.
    """
    config = folder / CONFIG_FILENAME
    if not config.is_file():
        raise NotFoundError(f"there is no {config}; a model is planned by its configuration")
    try:
        definition = define_offline(config)
    except WeftError as error:
        raise InvalidArgumentError(f"{config} has errors, which `weft check` shows: {error.message}") from error
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or "cannot be read", str(config)) from error
    version, context = max(definition.contexts.items(), key=lambda item: item[0])
    if not context.directory.is_dir():
        raise NotFoundError(f"model '{folder.name}' has no folder {version}; build or fetch the model")
    num_instances = len(definition.instances)
    if any(instance.kind != "CPU" for instance in definition.instances):  # on each GPU: files may name any
        num_instances = max(sum(max(group.count, 1) for group in definition.config.instance_group), 1)
    return Subject(
        folder.name,
        service,
        definition.config.backend,
        context,
        num_instances,
        max(definition.config.max_batch_size, 1),
        definition.config.default_model_filename,
    )


def shapes_of(text: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Parse ``INPUT=1x128`` to dims by input. Raises InvalidArgumentError for an invalid dimension."""
    shapes = {}
    for name, spelled in text.items():
        parts = spelled.lower().split("x")
        if not all(part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
            raise InvalidArgumentError(
                f"--shape {name}={spelled}: dims are whole numbers above 0 with x between, such as {name}=3x224x224"
            )
        shapes[name] = tuple(map(int, parts))
    return shapes
