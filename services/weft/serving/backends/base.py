"""The interface of backends: classes that load and run models, on the threads of instances.

``TensorBackend`` runs models whose requests share arrays; ``RowBackend`` runs transforms, and names the bad row.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import quote

import numpy as np

from weft.base.core import InferCall, InferResult, ParameterValue
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.signature import ModelSignature
from weft.base.tensors import Array
from weft.serving.backends.layout import Allocate, BatchLayout, make_gatherer
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

if TYPE_CHECKING:
    from concurrent.futures import Future

    from prometheus_client.metrics_core import Metric

    from weft.serving.block_exchange import BlockExchange
    from weft.serving.scheduler.rate_limiter import RateLimit


_num_rows = attrgetter("num_rows")


class NestedStream(Protocol):
    """The responses to one call of a decoupled model; thread-safe, for one caller at a time."""

    def next(self) -> "Future[InferResult | None]":
        """The next response; None after the last."""

    def cancel(self) -> None:
        """Cancel the call."""


class ModelCaller(Protocol):
    """Lets a model call other models; thread-safe.

    Deadline, priority, headers and trace context are those of the calling requests. A call is cancelled when the
    clients of all of them have left.
    """

    def infer(self, call: InferCall, parents: "Sequence[InferenceRequest]", origin: str) -> "Future[InferResult]":
        """Call a model on behalf of ``parents``, possibly none; cancelling the future cancels the call.

        The future fails with a WeftError. ``origin`` is the calling instance, as ``InstanceContext.origin`` returns it.
        """

    def stream(self, call: InferCall, parents: "Sequence[InferenceRequest]", origin: str) -> NestedStream:
        """Call a model that may be decoupled."""


class MetricSink(Protocol):
    """Keeps the metrics that models define; implemented by ``CustomMetrics``, in this or another process."""

    def add_family(self, owner: str, name: str, description: str, kind: str) -> None:
        """Add a family, if it is new. Raises InvalidArgumentError."""

    def add_metric(self, owner: str, name: str, labels: Mapping[str, str], bounds: Sequence[float] | None) -> Any:
        """Add a metric, if it is new; returns its key in the family. Raises InvalidArgumentError."""

    def record(self, name: str, labels: Any, action: str, number: float) -> None:
        """Update a metric by a valid action."""

    def value(self, name: str, labels: Any) -> float:
        """The value of a counter or gauge. Raises UnsupportedError for a histogram."""

    def release(self, owner: str) -> None:
        """Remove the metrics that have no other owner."""


class MetricExports(Protocol):
    """Exports metrics that backends count themselves, named ``weft_...``; thread-safe."""

    def attach(self, owner: str, read: "Callable[[], Iterable[Metric]]") -> None:
        """Call ``read`` at every scrape, on its thread."""

    def detach(self, owner: str) -> None:
        """Remove the owner's metrics."""


class RepositoryControl(Protocol):
    """Lets a model load and unload models; thread-safe; the futures fail with a WeftError."""

    def load(self, asker: str, name: str, parameters: "Mapping[str, ParameterValue | bytes]") -> "Future[None]":
        """Load ``name`` with the parameters of ``RepositoryModelLoad``, for the model ``asker``."""

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Unload ``name`` for the model ``asker``."""

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Whether the version ("" = any) serves."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model version that a backend loads.

    Attributes:
        directory: The version folder, ``<repository>/<model>/<version>``.
        config: The whole configuration as JSON-like data with the field names of ``config.pbtxt``; enums are names,
            64-bit integers are strings, as in protobuf's JSON form.
        parameters: ``parameters { key value { string_value } }`` without those of the scheduler.
        fault: Makes the error for a field, such as ``fault("parameters[top_k]", "...")``, with file, line and column.
        caller: Calls other models; it, ``metrics``, ``control`` and ``exports`` are None if not available.
        control: Loads and unloads other models.
        mesh_key: Secret that the services of the mesh share; "": there is none.
        blocks: Exchanges blocks of KV caches with other model services; None: there is none.
    """

    signature: ModelSignature
    directory: Path
    config: Mapping[str, Any]
    parameters: Mapping[str, str]
    fault: Callable[[str, str], InvalidArgumentError] = lambda _path, message: InvalidArgumentError(message)
    layout: BatchLayout = field(default_factory=BatchLayout)
    caller: ModelCaller | None = None
    metrics: MetricSink | None = None
    control: RepositoryControl | None = None
    exports: MetricExports | None = None
    mesh_key: str = field(default="", repr=False)
    blocks: "BlockExchange | None" = None

    def error(self, path: str, text: str) -> InvalidArgumentError:
        """The error for a field, as ``fault`` makes it; the message begins with the model's name."""
        return self.fault(path, f"model '{self.signature.name}': {text}")


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """Device and identity of one instance.

    Attributes:
        name: For logs and metrics, for example ``minilm_0_0``.
        kind: ``"CPU"`` or ``"GPU"``.
        device_id: CUDA device of a GPU instance; 0 on CPU.
        may_use_cpu: A GPU instance may run on the CPU instead, if the backend's library cannot use the GPU.
        is_inline: ``Backend.execute`` is called on the event loop instead of the thread of the instance.
        token: Identifies the instance among all loads and processes.
    """

    name: str
    kind: str = "CPU"
    device_id: int = 0
    rate_limit: "RateLimit | None" = None
    may_use_cpu: bool = False
    is_inline: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12], compare=False)

    def origin(self, signature: ModelSignature) -> str:
        """The instance's entry in the path of nested calls."""
        return f"{quote(signature.name, safe='')}.{signature.version}.{self.token}"


@dataclass(slots=True)
class Batch:
    """The requests of one execution, in order.

    A backend sets ``infer_start_ns`` when its inputs are ready and ``infer_end_ns`` when the model has run; the time
    before counts as compute input, the time after as compute output.
    """

    requests: Sequence[InferenceRequest]
    start_ns: int = field(default_factory=time.monotonic_ns)
    infer_start_ns: int = 0
    infer_end_ns: int = 0
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = sum(map(_num_rows, self.requests))


class Backend(ABC):
    """Runs one model version in one instance. Every method is called on that instance's own thread.

    One that ``is_remote`` has no thread: ``open``, ``start`` and ``shut`` are called on the event loop, in place of
    ``load``, ``execute`` and ``close``. A ``TensorBackend`` that ``can_share_processor`` has ``execute`` and ``run``
    called on other threads too.
    An instance that ``is_inline`` has its ``execute`` called on the event loop, while no other method runs.
    """

    #: Called before a load with the JSON-like configuration and the version folder; returns the completed
    #: configuration (``input``, ``output``, ``max_batch_size``). None: the configuration must be complete.
    auto_complete: ClassVar[Callable[[dict[str, Any], Path], dict[str, Any]] | None] = None

    #: Whether ``auto_complete`` is called even if inputs and outputs are declared.
    completes_always: ClassVar[bool] = False

    #: Whether a batch that failed is executed again, each request alone, so that a bad one does not fail the others.
    #: True only for models without state and side effects.
    is_repeatable: ClassVar[bool] = False

    #: Whether executions have no effects outside, so that routers may send a request again that was lost.
    has_no_effects: ClassVar[bool] = False

    #: Whether the backend runs decoupled models: the responses to a request go through ``request.stream``, while
    #: ``execute`` runs or later, and the outcome is ``STREAMED``.
    can_stream: ClassVar[bool] = False

    #: Whether a decoupled model answers a unary call with all responses as one: the request then ``is_collected``.
    #: False: such calls are refused.
    can_collect: ClassVar[bool] = False

    #: Whether the outcome may be ``RESCHEDULED``: the request is executed again. For iterative sequences.
    can_reschedule: ClassVar[bool] = False

    #: ``input`` where a configuration may declare none, ``output`` likewise.
    may_lack: ClassVar[tuple[str, ...]] = ()

    #: Whether outputs must be as the configuration says. False: they are passed on with the datatype and shape that the
    #: model gave them, and those that the configuration does not have are left out.
    checks_outputs: ClassVar[bool] = True

    #: Values of the parameter ``EXECUTION``: where an instance executes. The first is the default.
    execution_modes: ClassVar[tuple[str, ...]] = ("thread", "inline")

    #: Whether instances may be placed on a GPU. False: KIND_AUTO means CPU, KIND_GPU is refused.
    can_use_gpu: ClassVar[bool] = True

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        self.model = model
        self.instance = instance
        #: Set by the instance; a backend calls it, from any thread, when it is lost.
        self.on_lost: Callable[[], None] = lambda: None
        #: Batches that it executes at once, of one that ``is_remote``; known once it is open.
        self.num_at_once = 1

    @classmethod
    def num_slots(cls, model: ModelContext) -> int:
        """Number of requests that one instance processes concurrently; 0: it runs one batch after another.

        With slots, ``execute`` takes requests in and returns; the model must be decoupled. Raises InvalidArgumentError.
        """
        return 0

    @classmethod
    def is_remote(cls, model: ModelContext) -> bool:
        """Whether the model runs in another process, which the event loop talks to."""
        return False

    async def open(self) -> None:
        """As ``load``; each call after a loss starts anew. Raises a WeftError."""
        raise NotImplementedError

    def start(self, batch: Batch, on_end: Callable[[list[Outcome] | None], None]) -> None:
        """As ``execute``: ``on_end`` gets one outcome for each request, later, whatever happens.

        Batches that are started while others execute are executed in order. When the model is lost, ``on_lost`` is
        called before that, and ``on_end`` gets None for a batch that was not begun.
        """
        raise NotImplementedError

    async def shut(self) -> None:
        """As ``close``."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise what ``load`` would for the parameters and for the headers of the files; by default, load.

        ``weft check`` calls it in place of ``load`` or ``open``. It is quick, and runs nothing of the model.
        """
        self.load()

    @abstractmethod
    def load(self) -> None:
        """Make the model ready. Raises a WeftError that names the cure; the model is then not served."""

    @abstractmethod
    def execute(self, batch: Batch) -> list[Outcome]:
        """Answer each request of the batch, in order.

        A WeftError in the list fails that request alone. A WeftError that is raised fails every request of the batch
        with it; any other exception fails them with INTERNAL and an error id. If the backend ``is_repeatable``, each
        request of the batch is first executed again alone.

        ``request.context.deadline_ns`` is the deadline of a request; a long execution may stop early once
        ``request.is_withdrawn``.
        """

    def why_lost(self) -> str:
        """Why the backend has crashed and must be loaded again, by ``load``; "" if it has not."""
        return ""

    def abort(self) -> None:  # noqa: B027  # most backends cannot
        """End a hanging ``load`` or ``execute``, if possible; called on another thread."""

    def close(self) -> None:  # noqa: B027  # most backends have nothing to release
        """Release what ``load`` took; called once, after the last batch."""


class TensorBackend(Backend):
    """A backend that gets one array per input, with the rows of all requests of the batch."""

    is_repeatable = True
    has_no_effects = True

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        super().__init__(model, instance)
        self._gatherer = make_gatherer(model.signature, model.layout)

    def gather_into(self, allocate: Allocate) -> None:
        """Use ``allocate`` for the arrays into which the inputs of ``run`` are gathered."""
        self._gatherer = make_gatherer(self.model.signature, self.model.layout, allocate)

    @abstractmethod
    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compute outputs from gathered inputs; with batching, each output's first axis has ``num_rows`` entries."""

    def can_share_processor(self) -> bool:
        """Whether executions may run side by side, with ``run`` computing on the calling thread without the GIL.

        The operating system can then prioritise one over the other. Asked after ``load``; True only if the backend
        never crashes.
        """
        return False

    def in_background(self, compute: Callable[[Callable[[], dict[str, Array]]], dict[str, Array]]) -> "TensorBackend":
        """A view of the loaded backend whose ``run`` goes through ``compute``."""
        other = copy(self)
        run = self.run
        other.run = lambda inputs, num_rows: compute(lambda: run(inputs, num_rows))  # type: ignore[method-assign]
        return other

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Convert one request to the arrays that ``run`` takes; a WeftError fails this request alone."""
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
        if not refused:
            return self._answer(batch, members, batch.num_rows)
        num_rows = sum(request.num_rows for request, _ in members)
        answers = iter(self._answer(batch, members, num_rows) if members else ())
        return [refused[index] if index in refused else next(answers) for index in range(len(batch.requests))]

    def _answer(
        self, batch: Batch, members: list[tuple[InferenceRequest, dict[str, Array]]], num_rows: int
    ) -> list[Outcome]:
        inputs = self._gatherer.gather(members)
        batch.infer_start_ns = time.monotonic_ns()
        outputs = self.run(inputs, num_rows)
        batch.infer_end_ns = time.monotonic_ns()
        return list(map(InferenceResponse, self._gatherer.scatter(members, outputs)))


class RowBackend(TensorBackend):
    """A ``TensorBackend`` on the CPU whose arrays always have a batch dimension.

    ``run`` takes and returns arrays ``[num_rows, ...]`` of all requests of the batch; those of a model with
    ``max_batch_size`` 0 have one row. It checks the data of all rows at once: after an InvalidArgumentError every
    request runs alone, and only those with invalid data fail.
    """

    can_use_gpu: ClassVar[bool] = False

    def rows(self, request: InferenceRequest, name: str) -> Array:
        """Input ``name`` as ``[num_rows, ...]``. Raises InvalidArgumentError for an optional one that is missing."""
        if name not in request.call.inputs:
            raise InvalidArgumentError(f"input '{name}' is missing; this model needs it in every request")
        array = request.array(name)
        return array if self.model.signature.max_batch_size else array[None]

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Every input with its batch dimension."""
        return {spec.name: self.rows(request, spec.name) for spec in self.model.signature.inputs}

    def execute(self, batch: Batch) -> list[Outcome]:
        """Prepare, gather, run, scatter."""
        outcomes = self._outcomes(batch)
        if not self.model.signature.max_batch_size:
            for outcome in outcomes:
                if isinstance(outcome, InferenceResponse):
                    outcome.outputs = {name: array[0] for name, array in outcome.outputs.items()}
        return outcomes

    def _outcomes(self, batch: Batch) -> list[Outcome]:
        try:
            return super().execute(batch)
        except InvalidArgumentError as error:
            if len(batch.requests) == 1:
                return [error]
        alone = [self._outcomes(Batch([request]))[0] for request in batch.requests]
        batch.infer_end_ns = time.monotonic_ns()
        return alone


def check_rows(is_good: Array, name: str, fault: Callable[[int], str]) -> None:
    """Raise InvalidArgumentError unless every element of ``is_good``, bool ``[num_rows, ...]``, is true.

    The message names the input and the first bad row; ``fault`` describes it and what is allowed.
    """
    if not is_good.all():
        row = int(is_good.reshape(len(is_good), -1).all(axis=1).argmin())
        raise InvalidArgumentError(f"input '{name}' row {row}: {fault(row)}")


def check_finite(array: Array, name: str) -> None:
    """Raise InvalidArgumentError with the first row of ``array``, ``[num_rows, ...]``, that has NaN or infinity."""
    is_finite = np.isfinite(array)
    if not is_finite.all():
        check_rows(is_finite, name, lambda row: f"{first_bad(array[row], is_finite[row])}; numbers must be finite")


def first_bad(values: Array, is_good: Array) -> str:
    """The first bad value of one row, with its index: ``"nan at [2]"``."""
    index = np.unravel_index(int(np.argmin(is_good)), is_good.shape)
    return f"{values[index]} at [{', '.join(map(str, index))}]" if index else f"{values}"
