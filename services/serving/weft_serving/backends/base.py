"""The interface between an instance thread and the code that runs a model."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weft_common.errors import InternalError, WeftError
from weft_common.signature import ModelSignature
from weft_common.tensors import Array
from weft_serving.request import InferenceRequest, InferenceResponse, Outcome


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model version that a backend loads.

    Attributes:
        signature: Names, types, shapes, ``max_batch_size``.
        directory: The version folder, ``<repository>/<model>/<version>``.
        config: The whole configuration as JSON-like data with the field names of ``config.pbtxt``; enums are names,
            64-bit integers are strings, as protobuf's JSON form has them.
        parameters: ``parameters { key value { string_value } }`` of the configuration.
    """

    signature: ModelSignature
    directory: Path
    config: Mapping[str, Any]
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """The place that one instance runs in.

    Attributes:
        name: For logs and metrics, for example ``minilm_0_0``.
        kind: ``"CPU"`` or ``"GPU"``.
        device_id: CUDA device of a GPU instance; 0 on CPU.
    """

    name: str
    kind: str = "CPU"
    device_id: int = 0


@dataclass(slots=True)
class Batch:
    """The requests of one execution, in the order they were taken.

    A backend stamps ``infer_start_ns`` when its inputs are ready and ``infer_end_ns`` when the model has run; what lies
    before and after is counted as compute input and compute output.
    """

    requests: Sequence[InferenceRequest]
    start_ns: int = field(default_factory=time.monotonic_ns)
    infer_start_ns: int = 0
    infer_end_ns: int = 0

    @property
    def num_rows(self) -> int:
        """Sum of the members' batch sizes."""
        return sum(request.num_rows for request in self.requests)


class Backend(ABC):
    """Runs one model version in one instance. Every method is called on that instance's own thread.

    Args:
        model: What to load.
        instance: Where to run it.
    """

    #: Called before a load with the JSON-like configuration and the version folder; returns the completed
    #: configuration (``input``, ``output``, ``max_batch_size``). None: the configuration must be complete.
    auto_complete: ClassVar[Callable[[dict[str, Any], Path], dict[str, Any]] | None] = None

    #: Whether a batch that failed is executed again, each request alone, so that a bad one does not fail the others.
    #: True only for models without state and effects.
    is_repeatable: ClassVar[bool] = False

    #: Whether instances may be placed on a GPU. False: KIND_AUTO means CPU, KIND_GPU is refused.
    can_use_gpu: ClassVar[bool] = True

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        self.model = model
        self.instance = instance

    @abstractmethod
    def load(self) -> None:
        """Make the model ready. Raises a WeftError with the cure when it cannot; the model is then not served."""

    @abstractmethod
    def execute(self, batch: Batch) -> list[Outcome]:
        """Answer each request of the batch, in order.

        A WeftError in the list fails that request alone. A WeftError that is raised fails every request of the batch
        with it; any other exception fails them with INTERNAL and an error id. If the backend ``is_repeatable``, each
        request of the batch gets another try alone before.
        """

    def close(self) -> None:  # noqa: B027  # most backends have nothing to release
        """Release what ``load`` took; called once, after the last batch."""


class TensorBackend(Backend):
    """A backend that sees one array per input, with the rows of every request of the batch one after another."""

    is_repeatable = True

    @abstractmethod
    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Outputs for gathered inputs; each output's first axis has ``num_rows`` entries if the model batches."""

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Arrays of one request as ``run`` takes them; a WeftError raised here fails this request alone."""
        return {name: request.array(name) for name in request.call.inputs}

    def execute(self, batch: Batch) -> list[Outcome]:
        """Prepare, gather, run, scatter."""
        members: list[tuple[InferenceRequest, dict[str, Array]]] = []
        refused: dict[int, Outcome] = {}
        for index, request in enumerate(batch.requests):
            try:
                members.append((request, self.prepare(request)))
            except WeftError as error:
                refused[index] = error
        answers = iter(self._answer(batch, members) if members else ())
        return [refused[index] if index in refused else next(answers) for index in range(len(batch.requests))]

    def _answer(self, batch: Batch, members: list[tuple[InferenceRequest, dict[str, Array]]]) -> list[Outcome]:
        arrays = [prepared for _, prepared in members]
        inputs = arrays[0] if len(arrays) == 1 else {k: np.concatenate([a[k] for a in arrays]) for k in arrays[0]}
        num_rows = sum(request.num_rows for request, _ in members)
        batch.infer_start_ns = time.monotonic_ns()
        outputs = self.run(inputs, num_rows)
        batch.infer_end_ns = time.monotonic_ns()
        self._check_rows(outputs, num_rows)
        if len(members) == 1:
            return [InferenceResponse(outputs)]
        outcomes: list[Outcome] = []
        start = 0
        for request, _ in members:
            end = start + request.num_rows
            outcomes.append(InferenceResponse({name: array[start:end] for name, array in outputs.items()}))
            start = end
        return outcomes

    def _check_rows(self, outputs: dict[str, Array], num_rows: int) -> None:
        if self.model.signature.max_batch_size == 0:
            return
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != num_rows:
                raise InternalError(
                    f"model '{self.model.signature.name}' gave output '{name}' with shape {list(array.shape)} for a "
                    f"batch of {num_rows} rows; its first dimension must be {num_rows}"
                )
