"""A compiled graph as text, with every field that differs from its default: what corpora of plans are compared by."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, decode
from weft.language import GraphPlan
from weft.language.bandit_algorithms import BanditAlgorithm
from weft.language.dialects import GRAPH, Dialect
from weft.language.plan import Binding, CallPlan
from weft.language.types.conditions import CelCondition
from weft.router.combine import CombineMethod


def plan_text(plan: GraphPlan) -> str:
    """A line for each graph, node, step and policy, indented by where it is; tensors are NAME@SLOT."""
    return "\n".join(_lines("graph", plan))


def _lines(label: str, plan: Any) -> Iterator[str]:
    if isinstance(plan, CallPlan):
        yield f"{label}: {plan.target} {plan.model_name} {plan.model_version}{' streams' * plan.streams}".rstrip()
        return
    plain, inside = [], []
    for field in fields(plan):
        value = getattr(plan, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value == default:
            continue
        items = value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)
        if items and all(map(_is_plan, items)):
            inside += [(f"{field.name}[{i}]" if items is value else field.name, one) for i, one in enumerate(items)]
        else:
            plain.append(f"{field.name}={_plain(value)}")
    yield " ".join([f"{label}: {type(plan).__name__.removesuffix('Plan').lower()}", *plain])
    for name, one in inside:
        yield from (f"  {line}" for line in _lines(name, one))


def _is_plan(value: Any) -> bool:
    others = ModelSignature | Dialect | BanditAlgorithm | CombineMethod | CelCondition
    return is_dataclass(value) and not isinstance(value, others)


def _plain(value: Any) -> str:
    match value:
        case Binding():
            return f"{value.name}@{value.slot}"
        case CelCondition():
            return f"`{value.source}`{_plain(value.tensors)}"
        case ModelSignature():
            batch = (
                f"batch {value.max_batch_size}" + ", decoupled" * value.is_decoupled + ", collects" * value.can_collect
            )
            sides = " -> ".join(" ".join(map(_plain, side)) for side in (value.inputs, value.outputs))
            return f"{value.name}/{value.version} {value.platform} ({batch}; {sides})"
        case TensorSpec():
            dims = ",".join(map(str, value.dims))
            return f"{value.name}{'?' * value.is_optional}:{value.datatype}:{dims}"
        case WireTensor():
            return f"{value.datatype}{list(value.shape)} {decode(value).ravel().tolist() if value.data else []}"
        case CombineMethod() | BanditAlgorithm():
            return value.name
        case Dialect():
            return "graph" if value is GRAPH else type(value).__name__
        case Mapping():
            return "{" + " ".join(f"{key}:{_plain(one)}" for key, one in value.items()) + "}"
        case frozenset():
            return _plain(tuple(sorted(value)))
        case tuple():
            return f"({' '.join(map(_plain, value))})"
        case _:
            return str(value)
