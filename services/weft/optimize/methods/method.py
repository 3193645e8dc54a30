"""What a method of optimisation is: from a model's files to those of a smaller or faster one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from weft_protos.model_config_pb2 import ModelConfig

#: A batch of a model's own inputs by name, as the model is given them: with the batch dimension if it has one.
Inputs = Mapping[str, NDArray[Any]]


class SourceModel(NamedTuple):
    """A version of a model in a repository.

    Attributes:
        name: Of the model.
        folder: Of the version, for example ``model_repository/model/minilm/1``.
        config: Its ``config.pbtxt``, parsed.
        file: The model file within ``folder``, as the backend takes it.
    """

    name: str
    folder: Path
    config: ModelConfig
    file: Path


class Built(NamedTuple):
    """A candidate that is written.

    Attributes:
        parameters: Parameters of ``config.pbtxt`` that this version needs, beside those of the source.
        notes: What was done, in one line: ``"36 MatMul to int8, per channel; 2 left in fp32"``.
    """

    parameters: Mapping[str, str]
    notes: str


class OptimizationMethod(Protocol):
    """A way to make a candidate; without state, so that one object serves all models."""

    @property
    def name(self) -> str:
        """For tables and options, for example ``"int8-dynamic"``."""
        ...

    def unsuitable(self, source: SourceModel) -> str:
        """Why the method cannot apply to a model, or gains nothing there; empty if it may.

        Raises:
            InvalidArgumentError: The file cannot be read as what its name says.
        """
        ...

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the files of the candidate's version folder; the model file keeps its name.

        Args:
            source: Of which ``unsuitable`` has nothing to say. It is not changed.
            calibration: At least one batch of the model's own inputs.
            folder: Exists and is empty.

        Raises:
            WeftError: The method does not work for this model after all; the message says why. What stands in
                ``folder`` then is of no use.
        """
        ...
