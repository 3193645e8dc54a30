"""``OptimizationMethod``: makes a smaller or faster version from a model's files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: A batch of a model's own inputs by name, as the model is given them: with the batch dimension if it has one.
Inputs = Mapping[str, NDArray[Any]]


class SourceModel(NamedTuple):
    """A version of a model in a repository.

    Attributes:
        folder: Of the version, for example ``model_repository/model/minilm/1``.
        config: Its ``config.pbtxt``, parsed.
        file: The model file within ``folder``, as the backend takes it.
    """

    name: str
    folder: Path
    config: ModelConfig
    file: Path

    def has_gpu_instances(self) -> bool:
        """Whether ``instance_group`` asks for a GPU."""
        return any(group.kind == ModelInstanceGroup.KIND_GPU for group in self.config.instance_group)


class Built(NamedTuple):
    """A built candidate.

    Attributes:
        parameters: Parameters of ``config.pbtxt`` that this version needs, besides those of the source.
        notes: Summary in one line: ``"36 MatMul to int8, per channel; 2 left in fp32"``.
    """

    parameters: Mapping[str, str]
    notes: str


class OptimizationMethod(NamedTuple):
    """A way to make a candidate.

    Attributes:
        name: For tables and options, for example ``int8-dynamic``.
        unsuitable: Returns why the method cannot apply to a model, or gains nothing there; "" if it may. Raises
            InvalidArgumentError if the file contradicts its name.
        build: Gets the source, which it does not change, at least one batch of the model's own inputs, and an empty
            folder, to which it writes the files of the version; the model file keeps its name. Raises WeftError if the
            method does not work for this model after all; the folder is then useless.
    """

    name: str
    unsuitable: Callable[[SourceModel], str]
    build: Callable[[SourceModel, Sequence[Inputs], Path], Built]
