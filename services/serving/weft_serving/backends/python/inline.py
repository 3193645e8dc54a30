"""What a ``model.py`` that executes on the event loop may not do: wait for something that the event loop must do."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft_common.core import InferCall, ParameterValue
from weft_serving.backends.python.errors import TritonModelException
from weft_serving.request.request import InferenceRequest

if TYPE_CHECKING:
    from concurrent.futures import Future

    from weft_common.core import InferResult
    from weft_serving.backends.base import NestedStream


class InlineCaller:
    """The ``ModelCaller`` of a model that executes on the event loop: it calls nobody."""

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        """Raise TritonModelException."""
        raise _refusal(f"cannot call model '{call.model_name}'")

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "NestedStream":
        """Raise TritonModelException."""
        raise _refusal(f"cannot call model '{call.model_name}'")


class InlineControl:
    """The ``RepositoryControl`` of a model that executes on the event loop: it loads nothing."""

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Raise TritonModelException."""
        raise _refusal(f"cannot load model '{name}'")

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Raise TritonModelException."""
        raise _refusal(f"cannot unload model '{name}'")

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Raise TritonModelException."""
        raise _refusal(f"cannot ask for model '{name}'")


def _refusal(what: str) -> TritonModelException:
    return TritonModelException(
        f"a model with the parameter EXECUTION inline {what}: it executes on the event loop, which would wait for "
        "itself; remove the parameter"
    )
