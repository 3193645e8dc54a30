"""What the router serves by a name, a version of a graph or a model of a target, behind one interface."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.signature import ModelSignature
from weft.base.validation import scheduling_parameters
from weft.router.admission import AdmissionController, ConcurrencyLimit
from weft.router.repository.config import config_of_signature
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.serving import graph_inference, model_inference
from weft.router.serving.graph_inference import GraphInference, count_failure, serving_of
from weft.router.serving.model_inference import ModelInference
from weft.router.target import Target, TargetModel
from weft_protos.model_config_pb2 import ModelConfig


class Inference(Protocol):
    """A request that was begun; it ends with ``answer``, or else with ``fail``.

    Attributes:
        work: What takes time; await it once, and give what it returns to ``answer``.
    """

    work: Callable[[], Awaitable[Any]]

    def answer(self, outcome: Any) -> InferResult:
        """The answer. Raises WeftError for a bad one; then call ``fail``."""

    def fail(self, error: BaseException) -> None:
        """``work`` or ``answer`` has raised this. Raises in its place what the client is to see, where it differs."""


class Served(Protocol):
    """Answers requests by its name, or says why it cannot."""

    @property
    def is_decoupled(self) -> bool:
        """Whether a request has any number of responses; False of a graph that is not loaded."""

    @property
    def can_answer_once(self) -> bool:
        """Whether a request may ask for one response; True of a graph that is not loaded."""

    @property
    def is_ready(self) -> bool:
        """Whether it can answer, with all that it needs."""

    @property
    def version(self) -> str:
        """Numeric, as a string."""

    def signature(self) -> ModelSignature:
        """Names, types and shapes. Raises UnavailableError for a graph that is not loaded."""

    def config(self) -> ModelConfig:
        """Its configuration. Raises UnavailableError for a graph that is not loaded."""

    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """``priority`` and ``timeout`` (us) of a request as far as they matter here; 0 for none.

        Raises:
            InvalidArgumentError: One of them is not a whole number, or is negative.
        """

    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        """Its limit of requests in flight, with what its policy says now. Raises as ``signature``."""

    def begin(self, call: InferCall, context: CallContext) -> Inference:
        """Begin a request for one response. Raises WeftError."""

    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses to one request, where it is decoupled. Raises WeftError, also after some responses."""

    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """Count a request that was refused; the calls of a model are counted where they are made."""


class ServedGraph(NamedTuple):
    """A version of a graph, loaded or not."""

    graph: GraphVersion
    table: GraphTable

    @property
    def is_decoupled(self) -> bool:
        """As ``Served``."""
        serving = self.graph.serving
        return serving is not None and serving.plan.signature.is_decoupled

    @property
    def can_answer_once(self) -> bool:
        """As ``Served``."""
        serving = self.graph.serving
        return serving is None or not serving.plan.signature.is_decoupled or serving.plan.signature.can_collect

    @property
    def is_ready(self) -> bool:
        """As ``Served``."""
        return not self.table.why_not_ready(self.graph)

    @property
    def version(self) -> str:
        """As ``Served``."""
        return self.graph.file.version

    def signature(self) -> ModelSignature:
        """As ``Served``."""
        return serving_of(self.graph).plan.signature

    def config(self) -> ModelConfig:
        """As ``Served``."""
        return self.table.config(serving_of(self.graph))

    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """As ``Served``."""
        return scheduling_parameters(parameters)

    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        """As ``Served``."""
        graph = self.graph
        plan = (graph.serving or serving_of(graph)).plan
        return admission.limit("graph", graph.file.name, plan.max_inflight, is_stream=plan.signature.is_decoupled)

    def begin(self, call: InferCall, context: CallContext) -> Inference:
        """As ``Served``."""
        return GraphInference(self.graph, call, context)

    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Served``."""
        return graph_inference.stream_infer(self.graph, call, context)

    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """As ``Served``."""
        count_failure(self.graph, error, context)


class ServedTargetModel(NamedTuple):
    """A model of a target, ready or not."""

    target: Target
    model: TargetModel

    @property
    def is_decoupled(self) -> bool:
        """As ``Served``."""
        return self.model.signature.is_decoupled

    @property
    def can_answer_once(self) -> bool:
        """As ``Served``."""
        signature = self.model.signature
        return not signature.is_decoupled or signature.can_collect

    @property
    def is_ready(self) -> bool:
        """As ``Served``."""
        return self.model.is_ready

    @property
    def version(self) -> str:
        """As ``Served``."""
        return self.model.signature.version

    def signature(self) -> ModelSignature:
        """As ``Served``."""
        return self.model.signature

    def config(self) -> ModelConfig:
        """As ``Served``."""
        model = self.model
        return model.config if model.config is not None else config_of_signature(model.signature)

    def scheduling(self, parameters: Parameters) -> tuple[int, int]:
        """As ``Served``; what they mean beyond admission is for the model's own server to say."""
        return scheduling_parameters(parameters)[0], 0

    def limit(self, admission: AdmissionController) -> ConcurrencyLimit:
        """As ``Served``."""
        signature = self.model.signature
        return admission.limit("model", signature.name, is_stream=signature.is_decoupled)

    def begin(self, call: InferCall, context: CallContext) -> Inference:
        """As ``Served``."""
        if call.model_version:
            call.model_version = self.model.signature.version  # "01" is 1
        return ModelInference(self.target, self.model, call, context)

    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Served``."""
        if call.model_version:
            call.model_version = self.model.signature.version
        return model_inference.stream_infer(self.target, self.model, call, context)

    def count_refusal(self, error: BaseException, context: CallContext) -> None:
        """As ``Served``."""
