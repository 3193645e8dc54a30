"""What ``benchmarks.executor`` measures: graphs as text, their requests, and a target that answers at once."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, encode
from weft.router.repository.config import config_of_signature
from weft.router.target import TargetModel

MAX_BATCH_SIZE = 32
#: Rows whose first element is above this are what ``accept`` of the cascades takes.
_ACCEPT = "max(outputs.Y) > 0.5"
_SPEC = TensorSpec("X", "FP32", (4,))
_HEADER = """
name: "bench" platform: "graph" max_batch_size: 32
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


class InstantTarget:
    """A target whose models take X and give Y; it answers at once with the input, and counts its calls."""

    name = "model"
    address = "in process"

    def __init__(self) -> None:
        self.num_calls = 0
        self.models = {"m": ModelSignature("m", "1", "", MAX_BATCH_SIZE, (_SPEC,), (TensorSpec("Y", "FP32", (4,)),))}

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The input as the output."""
        self.num_calls += 1
        return InferResult("m", "1", call.request_id, {}, {"Y": call.inputs["X"]})

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """One response."""
        yield await self.infer(call, context)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """The one model."""
        return [TargetModel(one, True, config_of_signature(one)) for one in self.models.values()]

    async def close(self) -> None:
        """Nothing is open."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As a catalog for the compiler."""
        found = self.models.get(model_name)
        return (self.name, found) if found else None

    def names(self) -> list[str]:
        """As a catalog for the compiler."""
        return list(self.models)


@dataclass(frozen=True, slots=True)
class Case:
    """One graph and one kind of request.

    Attributes:
        name: For the table.
        graph: Content of ``graph.pbtxt``.
        num_steps: Steps that a request runs; the time that the graph adds is divided by it.
        num_calls: Calls of the target by a request; checked, because a case that does something else measures nothing.
        first_element: Of each row of X.
        parameters, headers: Of each request.
    """

    name: str
    graph: str
    num_steps: int
    num_calls: int
    first_element: Sequence[float] = (1.0,)
    parameters: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def inputs(self) -> dict[str, WireTensor]:
        """Tensors of a request."""
        rows = np.zeros((len(self.first_element), 4), np.float32)
        rows[:, 0] = self.first_element
        return {"X": encode(rows)}

    def request(self) -> Callable[[], InferCall]:
        """A function that makes the next request, as little as a request can be."""
        inputs, parameters = self.inputs(), self.parameters
        return lambda: InferCall("bench", "", "", parameters, dict(inputs))


def _node(body: str) -> str:
    return f'{_HEADER}node {{ name: "root" {body} }}'


def _sequence(num_steps: int, policy: str = "") -> str:
    steps = []
    for i in range(num_steps):
        source, result = (f"T{i}" if i else "X"), ("Y" if i == num_steps - 1 else f"T{i + 1}")
        maps = f'input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{result}" }}'
        steps.append(f'step {{ name: "s{i}" model_name: "m" {maps} {policy} }}')
    return _node(f"sequence {{ {' '.join(steps)} }}")


def _switch(num_cases: int) -> str:
    steps = [f'step {{ name: "s{i}" case: "{i}" model_name: "m" }}' for i in range(num_cases)]
    rest = 'step { name: "rest" otherwise: true model_name: "m" }'
    return _node(f"""switch {{ on: 'get(parameters, "key", "")' {" ".join(steps)} {rest} }}""")


def _when(num_steps: int) -> str:
    steps = [f"step {{ name: 's{i}' when: 'inputs.X[0] < {i + 1}.0' model_name: 'm' }}" for i in range(num_steps)]
    return _node(f"switch {{ {' '.join(steps)} step {{ name: 'rest' otherwise: true model_name: 'm' }} }}")


_TWO = 'step { name: "a" weight: 90 model_name: "m" } step { name: "b" weight: 10 model_name: "m" }'
_RANDOM = _node(f"splitter {{ {_TWO} }}")
_STICKY = _node(f"""splitter {{ sticky_by: 'get(headers, "x-user-id", "")' {_TWO} }}""")
_THREE = " ".join(f'step {{ name: "{name}" model_name: "m" }}' for name in "abc")
_AVERAGE = _node(f'ensemble {{ {_THREE} combine {{ output: "Y" method: AVERAGE }} }}')
_CASCADE = _node(
    f"cascade {{ per_row: true step {{ name: 'small' model_name: 'm' accept: '{_ACCEPT}' }} "
    "step { name: 'large' model_name: 'm' } }"
)
_NESTED = (
    _HEADER
    + 'node { name: "root" sequence { step { name: "inner" node: "inner" } } }'
    + 'node { name: "inner" sequence { step { name: "s0" model_name: "m" } } }'
)

CASES = (
    Case("sequence of 1", _sequence(1), 1, 1),
    Case("sequence of 3", _sequence(3), 3, 3),
    Case("sequence of 10", _sequence(10), 10, 10),
    Case("sequence in a sequence", _NESTED, 2, 1),
    Case("switch on a parameter, 1 case", _switch(1), 1, 1, parameters={"key": "0"}),
    Case("switch, 20 cases, first hit", _switch(20), 1, 1, parameters={"key": "0"}),
    Case("switch, 20 cases, last hit", _switch(20), 1, 1, parameters={"key": "19"}),
    Case("switch, 20 tests of a tensor, first holds", _when(20), 1, 1, (0.5,)),
    Case("switch, 20 tests of a tensor, last holds", _when(20), 1, 1, (19.5,)),
    Case("splitter, random", _RANDOM, 1, 1),
    Case("splitter, sticky", _STICKY, 1, 1, headers={"x-user-id": "user-7"}),
    Case("ensemble of 3, AVERAGE", _AVERAGE, 3, 3),
    Case("cascade per row, 32 rows, all accepted", _CASCADE, 1, 1, (1.0,) * 32),
    Case("cascade per row, 32 rows, half goes on", _CASCADE, 2, 2, (1.0, 0.0) * 16),
    Case("1 step, timeout", _sequence(1, "policy { timeout_ms: 1000 }"), 1, 1),
    Case("1 step, at most 8 in flight", _sequence(1, "policy { max_inflight: 8 }"), 1, 1),
    Case("1 step, retry not needed", _sequence(1, "policy { retry { attempts: 3 } }"), 1, 1),
    Case("1 step, hedge not needed", _sequence(1, "policy { hedge { after_ms: 1000 } }"), 1, 1),
    Case(
        "1 step, SOFT with default",
        _sequence(1, "dependency: SOFT default { output: 'Y' number: [ 0, 0, 0, 0 ] }"),
        1,
        1,
    ),
    Case(
        "1 step, fallback not needed",
        _sequence(1, "fallback { model_name: 'm' input_map { key: 'X' value: 'X' } }"),
        1,
        1,
    ),
    Case("1 step, answer in the cache", _sequence(1, "policy { cache { ttl_ms: 0 } }"), 1, 0),
)
