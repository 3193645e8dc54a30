"""The request to explain, from the command line."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weft_common.errors import InvalidArgumentError
from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import num_elements
from weft_common.text.pbtxt import suggestion
from weft_common.validation import scheduling_parameters
from weft_router.graph.plan import Condition, GraphPlan, NodePlan, StepPlan
from weft_router.graph.types.expression import read_expression
from weft_router.requests.routes import ROUTE_HEADER, Routes
from weft_router.scope import RequestScope
from weft_tools.explain.judge import Knowledge
from weft_tools.explain.values import ABSENT, Value
from weft_tools.request import content_of, parameter_value, tensor_from_json

#: An entry of a map that a condition names: parameters.lang, headers["x-tier"].
_ENTRY = re.compile(r"""\b(parameters|headers)\s*(?:\.\s*([A-Za-z_]\w*)|\[\s*["']([^"'\\]+)["']\s*\])""")
_MAX_ELEMENTS = 1 << 40
_GET = re.compile(r"""\bget\(\s*(parameters|headers)\s*,\s*["']([^"'\\]+)["']""")


@dataclass(frozen=True, slots=True)
class Question:
    """A request as far as it is known.

    Attributes:
        knowledge: Parameters, headers and the like.
        inputs: What is known of each input of the graph.
        num_rows: Rows of the batch; None where not known.
        outputs: Those asked for; empty means all.
        pins: Splitter -> step.
        hints: What the user may have mistyped.
    """

    knowledge: Knowledge
    inputs: Mapping[str, Value]
    num_rows: int | None
    outputs: tuple[str, ...]
    pins: Mapping[str, str]
    hints: tuple[str, ...]


def read_question(options: argparse.Namespace, plan: GraphPlan) -> Question:
    """The request that the options describe.

    Raises:
        InvalidArgumentError: A name is unknown, or a value does not fit.
        OSError: A file cannot be read.
    """
    signature = plan.signature
    is_batched = signature.max_batch_size > 0
    given: dict[str, Value] = {}
    for name, text in options.input:
        given[name] = Value.known(
            tensor_from_json(_full(_spec(signature, name), is_batched=is_batched), content_of(text))
        )
    for name, text in options.shape:
        if name in given:
            raise InvalidArgumentError(f"input '{name}' is given twice; a value has a shape already")
        spec = _spec(signature, name)
        shape = _shape(text, _full(spec, is_batched=is_batched))
        given[name] = Value.shaped(spec.datatype, shape, f"{name} of the request")
    num_rows = _num_rows(given, signature)
    headers = {name.lower(): value for name, value in options.header}
    parameters = {name: parameter_value(value) for name, value in options.param}
    if options.priority is not None:
        parameters["priority"] = options.priority
    priority, _ = scheduling_parameters(parameters)
    scope = RequestScope(parameters, headers, options.request_id, priority)
    return Question(
        Knowledge(scope, _least(options.remaining_ms, plan.timeout_ms, plan.root.timeout_ms)),
        {spec.name: given.get(spec.name) or _open(spec, num_rows, is_batched=is_batched) for spec in signature.inputs},
        num_rows,
        tuple(options.output),
        Routes(plan.root).parse(headers[ROUTE_HEADER]) if ROUTE_HEADER in headers else {},
        tuple(_hints(plan, [name for name, _ in options.param], headers)),
    )


def _spec(signature: ModelSignature, name: str) -> TensorSpec:
    spec = next((spec for spec in signature.inputs if spec.name == name), None)
    if spec is None:
        hint = suggestion(name, [spec.name for spec in signature.inputs])
        raise InvalidArgumentError(f"graph '{signature.name}' has no input '{name}'{hint}")
    return spec


def _full(spec: TensorSpec, *, is_batched: bool) -> TensorSpec:
    return replace(spec, dims=(-1, *spec.dims)) if is_batched else spec


def _shape(text: str, spec: TensorSpec) -> tuple[int, ...]:
    """``1,3`` or ``[1, 3]``; a leading batch dimension may be left out."""
    try:
        shape = tuple(int(size) for size in text.strip("[] ").split(",")) if text.strip("[] ") else ()
    except ValueError:
        raise InvalidArgumentError(f"shape '{text}' of input '{spec.name}' is no list of numbers; write 1,3") from None
    full = (1,) * (len(spec.dims) - len(shape)) + shape
    if len(full) != len(spec.dims) or any(
        want not in (-1, got) or got < 0 for got, want in zip(full, spec.dims, strict=True)
    ):
        raise InvalidArgumentError(f"shape {list(shape)} of input '{spec.name}' does not fit {list(spec.dims)}")
    if num_elements(full) > _MAX_ELEMENTS:
        raise InvalidArgumentError(f"shape {list(shape)} of input '{spec.name}' is of {num_elements(full)} elements")
    return full


def _num_rows(given: Mapping[str, Value], signature: ModelSignature) -> int | None:
    """Rows of the batch, which all inputs agree on."""
    if signature.max_batch_size <= 0:
        return None
    counts = {name: value.tensor.shape[0] for name, value in given.items() if value.tensor is not None}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
        raise InvalidArgumentError(f"inputs must have the same number of rows: {shown}")
    num_rows = next(iter(counts.values()), None)
    if num_rows is not None and not 1 <= num_rows <= signature.max_batch_size:
        raise InvalidArgumentError(
            f"a batch of {num_rows} rows; graph '{signature.name}' takes 1 to {signature.max_batch_size}"
        )
    return num_rows


def _open(spec: TensorSpec, num_rows: int | None, *, is_batched: bool) -> Value:
    """An input that nothing was said of: a required one is there, an optional one is not."""
    if spec.is_optional:
        return ABSENT
    return Value.unknown(spec, num_rows, f"{spec.name} of the request", is_batched=is_batched)


def _least(*limits_ms: float | None) -> float | None:
    return min((limit for limit in limits_ms if limit), default=None)


def _hints(plan: GraphPlan, parameters: Iterable[str], headers: Iterable[str]) -> Iterator[str]:
    """Parameters and headers that no condition reads: they do not change the path."""
    read: dict[str, set[str]] = {"parameters": set(), "headers": {ROUTE_HEADER}}
    for condition in _conditions(plan.root):
        for place, *keys in (*_ENTRY.findall(condition.source), *_GET.findall(condition.source)):
            read[place].update(filter(None, keys))
        for place in read_expression(condition.source).maps - {found[0] for found in _ENTRY.findall(condition.source)}:
            read[place].add("")  # read as a whole: any name may count
    for place, names in (("parameters", parameters), ("headers", headers)):
        for name in names:
            if name not in read[place] and "" not in read[place]:
                hint = suggestion(name, sorted(read[place] - {ROUTE_HEADER}))
                yield f"no condition of graph '{plan.signature.name}' reads {place[:-1]} '{name}'{hint}"


def _conditions(node: NodePlan) -> Iterator[Condition]:
    yield from node.conditions
    for step in (*node.steps, *node.shadows):
        yield from _step_conditions(step)


def _step_conditions(step: StepPlan) -> Iterator[Condition]:
    yield from filter(None, (step.when, step.accept, *(policy.condition for policy in step.policies)))
    if isinstance(step.action, NodePlan):
        yield from _conditions(step.action)
    if step.fallback is not None:
        yield from _step_conditions(step.fallback)
