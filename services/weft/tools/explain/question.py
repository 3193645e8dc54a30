"""Parses the request to explain from command-line texts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.base.core import RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, num_elements
from weft.base.text.pbtxt import suggestion
from weft.base.validation import scheduling_parameters
from weft.language.plan import CallPlan, GraphPlan
from weft.language.request_scope import RequestScope
from weft.language.types.expression import read_expression
from weft.router.requests import ROUTE_HEADER, Intermediates, Routes, steps_within
from weft.tools.explain.evaluator import Evaluator, Known, conditions_in, placeholder
from weft.tools.request import content_of, parameter_value, tensor_from_json

#: An entry of a map that a condition names: parameters.lang, headers["x-tier"].
_ENTRY = re.compile(r"""\b(parameters|headers)\s*(?:\.\s*([A-Za-z_]\w*)|\[\s*["']([^"'\\]+)["']\s*\])""")
_MAX_ELEMENTS = 1 << 40
_GET = re.compile(r"""\bget\(\s*(parameters|headers)\s*,\s*["']([^"'\\]+)["']""")


@dataclass(frozen=True, slots=True)
class Question:
    """A partly known request.

    Attributes:
        evaluator: Parameters, headers and the like.
        inputs: Knowledge of each input of the graph; None if absent.
        num_rows: Rows of the batch; None if unknown.
        pins: Splitter -> step.
        gives: Whether a model's answer has an optional output, if known; by path of the step and name.
    """

    evaluator: Evaluator
    inputs: Mapping[str, WireTensor | None]
    num_rows: int | None
    outputs: tuple[str, ...]
    pins: Mapping[str, str]
    hints: tuple[str, ...]
    gives: Mapping[str, bool] = field(default_factory=dict)


def read_question(
    plan: GraphPlan,
    *,
    inputs: Sequence[tuple[str, str]] = (),
    shapes: Sequence[tuple[str, str]] = (),
    parameters: Sequence[tuple[str, str]] = (),
    headers: Sequence[tuple[str, str]] = (),
    outputs: Sequence[str] = (),
    gives: Sequence[str] = (),
    lacks: Sequence[str] = (),
    request_id: str = "",
    priority: int | None = None,
    remaining_ms: float | None = None,
) -> Question:
    """Parse a request.

    Args:
        inputs: Value of an input as JSON, or ``@FILE``, by name.
        shapes: Shape of an input with unknown value, ``1,3``, by name.
        outputs: Requested ones; none means all.
        gives, lacks: Optional outputs, ``<step>/<output>``, that the models' answers have, and lack.
        priority: The request parameter of that name.
        remaining_ms: The client's deadline.

    Raises:
        InvalidArgumentError: A name is unknown, or a value does not fit.
        OSError: A file cannot be read.
    """
    signature = plan.signature
    is_batched = signature.max_batch_size > 0
    given: dict[str, WireTensor] = {}
    for name, text in inputs:
        given[name] = Known(*tensor_from_json(_spec(signature, name), content_of(text)))
    for name, text in shapes:
        if name in given:
            raise InvalidArgumentError(f"input '{name}' is given twice; a value has a shape already")
        spec = _spec(signature, name)
        shape = _shape(text, spec)
        row, num_rows = (shape[1:], shape[0]) if is_batched else (shape, None)
        given[name] = placeholder(replace(spec, dims=row), num_rows, f"{name} of the request")
    num_rows = _num_rows(given, signature)
    tensors: dict[str, WireTensor | None] = {}
    for spec in signature.inputs:  # nothing is said of one: a required one is there, an optional one is not
        rows, origin = (num_rows or 1) if is_batched else None, f"{spec.name} of the request"
        unknown = None if spec.is_optional else placeholder(spec, rows, origin, is_open=num_rows is None)
        tensors[spec.name] = given.get(spec.name, unknown)
    found = {name.lower(): value for name, value in headers}
    values = {name: parameter_value(value) for name, value in parameters}
    if priority is not None:
        values["priority"] = priority
    scope = RequestScope(values, found, request_id, scheduling_parameters(values)[0])
    return Question(
        Evaluator(scope, least(remaining_ms, plan.timeout_ms, plan.root.timeout_ms)),
        tensors,
        num_rows,
        _outputs(outputs, plan),
        Routes(plan.root).parse(found[ROUTE_HEADER]) if ROUTE_HEADER in found else {},
        tuple(_hints(plan, [name for name, _ in parameters], found)),
        _gives([*((name, True) for name in gives), *((name, False) for name in lacks)], plan),
    )


def _spec(signature: ModelSignature, name: str) -> TensorSpec:
    """An input with its full shape."""
    spec = next((spec for spec in signature.inputs if spec.name == name), None)
    if spec is None:
        hint = suggestion(name, [spec.name for spec in signature.inputs])
        raise InvalidArgumentError(f"graph '{signature.name}' has no input '{name}'{hint}")
    return replace(spec, dims=(-1, *spec.dims)) if signature.max_batch_size > 0 else spec


def _shape(text: str, spec: TensorSpec) -> tuple[int, ...]:
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


def _num_rows(given: Mapping[str, WireTensor], signature: ModelSignature) -> int | None:
    if signature.max_batch_size <= 0:
        return None
    counts = {name: tensor.shape[0] for name, tensor in given.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
        raise InvalidArgumentError(f"inputs must have the same number of rows: {shown}")
    num_rows = next(iter(counts.values()), None)
    if num_rows is not None and not 1 <= num_rows <= signature.max_batch_size:
        raise InvalidArgumentError(
            f"a batch of {num_rows} rows; graph '{signature.name}' takes 1 to {signature.max_batch_size}"
        )
    return num_rows


def _outputs(names: Sequence[str], plan: GraphPlan) -> tuple[str, ...]:
    graph, known = plan.signature.name, [spec.name for spec in plan.signature.outputs]
    requested = tuple(RequestedOutput(name, {}) for name in names)
    for name, _ in Intermediates(plan.root, known).own_outputs(requested, graph):
        if name not in known:
            raise InvalidArgumentError(f"graph '{graph}' has no output '{name}'{suggestion(name, known)}")
    return tuple(names)


def _gives(given: Sequence[tuple[str, bool]], plan: GraphPlan) -> dict[str, bool]:
    root = plan.root
    paths = {
        f"{step.path.removeprefix(root.path).removeprefix('/')}/{spec.name}": f"{step.path}/{spec.name}"
        for one in (*root.steps, *root.customs)
        for step, _ in steps_within(one)
        if isinstance(step.action, CallPlan)
        for spec in step.action.signature.outputs
        if spec.is_optional
    }
    found: dict[str, bool] = {}
    for name, is_given in given:
        if name not in paths:
            raise InvalidArgumentError(
                f"no model of graph '{plan.signature.name}' may leave out '{name}'{suggestion(name, paths)}; "
                f"outputs that may be left out: {', '.join(paths) or 'none'}"
            )
        if found.setdefault(paths[name], is_given) is not is_given:
            raise InvalidArgumentError(f"output '{name}' is both given and left out")
    return found


def least(*limits_ms: float | None) -> float | None:
    """The smallest limit; 0 and None mean no limit."""
    return min((limit for limit in limits_ms if limit), default=None)


def _hints(plan: GraphPlan, parameters: Iterable[str], headers: Iterable[str]) -> Iterator[str]:
    """Parameters and headers that no condition reads, so that they do not change the path."""
    read: dict[str, set[str]] = {"parameters": set(), "headers": {ROUTE_HEADER}}
    for _, _, condition in conditions_in(plan.root):
        for place, *keys in (*_ENTRY.findall(condition.source), *_GET.findall(condition.source)):
            read[place].update(filter(None, keys))
        for place in read_expression(condition.source).maps - {found[0] for found in _ENTRY.findall(condition.source)}:
            read[place].add("")  # read as a whole: any name may count
    for place, names in (("parameters", parameters), ("headers", headers)):
        for name in names:
            if name not in read[place] and "" not in read[place]:
                hint = suggestion(name, sorted(read[place] - {ROUTE_HEADER}))
                yield f"no condition of graph '{plan.signature.name}' reads {place[:-1]} '{name}'{hint}"
