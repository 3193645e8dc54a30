"""``pb_utils.load_model``, ``unload_model`` and ``is_model_ready`` of one model."""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from weft.base.core import ParameterValue
from weft.base.errors import WeftError
from weft.serving.backends.base import RepositoryControl
from weft.serving.backends.python.errors import TritonModelException, inline_refusal

_ResultT = TypeVar("_ResultT")


def model_loading(control: RepositoryControl, model: str) -> dict[str, Callable[..., Any]]:
    """The functions by name, for the model ``model``."""

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        _done(control.load(model, model_name, {**({"config": config} if config else {}), **(files or {})}))

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        _done(control.unload(model, model_name, unload_dependents=unload_dependents))

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        return _done(control.is_ready(model_name, model_version))

    return {"load_model": load_model, "unload_model": unload_model, "is_model_ready": is_model_ready}


class InlineControl:
    """The ``RepositoryControl`` of a model that executes on the event loop: it loads nothing."""

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot load model '{name}'")

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot unload model '{name}'")

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot ask for model '{name}'")


def _done(future: "Future[_ResultT]") -> _ResultT:
    try:
        return future.result()
    except WeftError as error:
        raise TritonModelException(error.message) from None
    except CancelledError:
        raise TritonModelException("the service is stopping; it loads and unloads no models") from None
