"""What the router serves by a name, a version of a graph or a model of a target, behind one interface."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from weft.base.core import CallContext, InferCall, InferResult, Parameters
from weft.base.signature import ModelSignature
from weft.router.admission.concurrency_limit import ConcurrencyLimit
from weft.router.admission.controller import AdmissionController
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
