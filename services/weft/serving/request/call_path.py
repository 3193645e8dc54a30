"""The path of nested calls: the instances that wait for the answer to a request.

It travels in a header, an entry for each call: the model's name, its version, and a token of the instance.
"""

from collections.abc import Collection, Iterable, Mapping
from urllib.parse import unquote

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.serving.request.request import InferenceRequest

CALL_PATH_HEADER = "x-weft-call-path"
#: Calls within calls; a path that is longer is taken for a loop.
MAX_CALL_DEPTH = 16

_SEPARATOR = ">"


def path_of(headers: Mapping[str, str]) -> list[str]:
    """Entries of the path that a request came by, the outermost first."""
    text = headers.get(CALL_PATH_HEADER, "")
    return text.split(_SEPARATOR) if text else []


def callers_of(headers: Mapping[str, str]) -> set[str]:
    """Tokens of the instances that wait for a request, as ``InstanceContext`` has them."""
    return {entry.rpartition(".")[2] for entry in path_of(headers)}


def longer_path(paths: Iterable[list[str]], origin: str, model: str) -> str:
    """The header of a call of ``model`` that ``origin`` makes for requests that came by ``paths``.

    Raises InvalidArgumentError if calls are nested too deeply.
    """
    path = [*max(paths, key=len, default=[]), origin]
    if len(path) > MAX_CALL_DEPTH:
        names = [unquote(entry.rsplit(".", 2)[0]) for entry in path]
        raise InvalidArgumentError(
            f"models call one another more than {MAX_CALL_DEPTH} deep: {' > '.join([*names, model])}; a model that "
            "calls itself, directly or through others, must come to an end"
        )
    return _SEPARATOR.join(path)


class SelfCalls:
    """Finds calls of a model to itself that would wait for ever; ``origins`` are its instances as entries of a path."""

    def __init__(self, model: str, origins: Collection[str]) -> None:
        self._model = model
        self._origins = frozenset(origins)

    def check(self, request: InferenceRequest, queued: Iterable[InferenceRequest]) -> None:
        """Raise ResourceExhaustedError if every instance waits for this request or for one that is queued."""
        held = self._held(request)
        if not held:
            return
        for other in queued:
            held |= self._held(other)
        if held == self._origins:
            instances = "its only instance waits" if len(held) == 1 else f"all of its {len(held)} instances wait"
            raise ResourceExhaustedError(
                f"model '{self._model}' calls itself, directly or through others, while {instances} for the answer; "
                "raise the count in instance_group, or do not call it"
            )

    def _held(self, request: InferenceRequest) -> frozenset[str]:
        headers = request.context.headers
        return self._origins.intersection(path_of(headers)) if CALL_PATH_HEADER in headers else frozenset()
