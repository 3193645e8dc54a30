"""The model that is optimised, and its files."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.repository.layout import CONFIG_FILENAME, folders_of_models, is_model_folder
from weft.base.text.pbtxt import parse, suggestion
from weft.base.versions import versions_to_serve
from weft.optimize.methods.method import SourceModel
from weft.serving.lifecycle.repository import ModelRepository, check_name
from weft.tools.offline import BACKENDS, GRAPH_FOLDER, define_offline
from weft_protos.model_config_pb2 import ModelConfig

#: The model file of a version folder by backend, where ``default_model_filename`` names no other.
_MODEL_FILES: Mapping[str, str] = {"onnxruntime": "model.onnx", "pytorch": "model.pt2"}
_HASHED_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class RepositoryModel:
    """A version of a model in a repository.

    Attributes:
        source: As methods take it.
        version: Its number.
        versions: Numbers of all version folders, ascending.
        service: Name of the folder of models that it is in, for example ``model``; "" where models lie side by side.
        repository: The whole repository.
        text: ``config.pbtxt`` as it stands.
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
        """Those of these versions that ``version_policy`` lets serve, ascending."""
        return versions_to_serve(self.source.config.version_policy, versions)


def find_model(repository: Path, name: str, version: int | None = None) -> RepositoryModel:
    """Find a model, and check that it can be optimised at all.

    Args:
        repository: Folder with the services' folders, or with models side by side.
        name: Of the model.
        version: None: the highest that is served.

    Raises:
        NotFoundError: There is no such repository, model or version.
        InvalidArgumentError: The configuration is missing or wrong, or methods for its backend do not exist.
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
    filename = config.default_model_filename or _MODEL_FILES.get(_backend_of(config), "")
    if not filename:
        raise InvalidArgumentError(
            f"'{name}' runs on the backend '{_backend_of(config)}'; there are methods for "
            f"{' and '.join(_MODEL_FILES)}. `weft quantize` makes language models smaller"
        )
    file = folder / str(chosen) / filename
    if not file.is_file():
        raise NotFoundError(f"'{name}' has no file {chosen}/{filename}; `make models` builds those of the samples")
    source = SourceModel(name, folder / str(chosen), config, file)
    return RepositoryModel(source, chosen, versions, service, repository, text)


def _backend_of(config: ModelConfig) -> str:
    return config.backend or config.platform.partition("_")[0]


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
    """Of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_HASHED_AT_ONCE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
