"""``Answer``: the outputs of a graph or model as numpy arrays, and how they came about."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from weft.base.core import InferResult, ParameterValue
from weft.base.tensors import Array, decode

PATH_HEADER = "x-graph-path"
TRACE_PARAMETER = "graph_trace"


class Answer(Mapping[str, Array]):
    """One response: outputs by item, and by attribute unless the class has one of that name.

    BYTES outputs are object arrays of ``bytes``. An output that the graph left out raises KeyError or AttributeError.

    Args:
        trailing: Trailing metadata, and the trace; one dictionary for all responses of a stream, whose last tells both.

    Attributes:
        model_name, model_version: What answered.
        parameters: Response parameters, without the trace.
    """

    def __init__(self, result: InferResult, trailing: dict[str, str]) -> None:
        self._outputs = {name: decode(tensor, name=name) for name, tensor in result.outputs.items()}
        self._trailing = trailing
        self.model_name, self.model_version = result.model_name, result.model_version
        self.parameters: dict[str, ParameterValue] = dict(result.parameters)
        if TRACE_PARAMETER in self.parameters:
            trailing[TRACE_PARAMETER] = str(self.parameters.pop(TRACE_PARAMETER))

    @property
    def path(self) -> str:
        """The steps that the request took, for example ``root.lid;clf=by_language[de]``; "" if unknown."""
        return self._trailing.get(PATH_HEADER, "")

    @property
    def trace(self) -> list[dict[str, Any]]:
        """What each step did: path, model, start_ms, ms, status; empty unless the request asked by ``graph_trace``."""
        trace: list[dict[str, Any]] = json.loads(self._trailing.get(TRACE_PARAMETER, "[]"))
        return trace

    @property
    def times_ms(self) -> dict[str, float]:
        """Milliseconds that each step took, by its path in the trace; of several runs of a step the sum."""
        times: dict[str, float] = {}
        for step in self.trace:
            times[step["path"]] = times.get(step["path"], 0.0) + step["ms"]
        return times

    def __getattr__(self, name: str) -> Array:
        outputs: dict[str, Array] = self.__dict__.get("_outputs", {})
        if name in outputs:
            return outputs[name]
        raise AttributeError(f"the answer has no output '{name}'; it has {', '.join(outputs) or 'none'}")

    @override
    def __getitem__(self, name: str) -> Array:
        return self._outputs[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    @override
    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={array.tolist()}" for name, array in self.items())
        return f"Answer({shown if len(shown) <= 500 else shown[:500] + '...'}, path={self.path!r})"
