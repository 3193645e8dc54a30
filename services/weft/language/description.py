"""Describes nodes in words and edges, for everything that shows graphs, independent of node kinds.

Each kind describes its own nodes (``NodePlan.describe``); texts are complete, the renderer shortens them.
"""

import json
from collections.abc import Iterator, Sequence

from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode
from weft.language.plan import CallPlan, Condition, Flow, NodePlan, StepPlan, TensorUse


def given(step: StepPlan) -> tuple[TensorUse, ...]:
    """Inputs of a step and its fallbacks; each slot once."""
    found: dict[int, TensorUse] = {}
    for one in step.chain():
        for name, slot in one.inputs:
            found.setdefault(slot, TensorUse(slot, taken_as=name))
    return tuple(found.values())


def offered(step: StepPlan) -> tuple[TensorUse, ...]:
    """Every output of a step."""
    return tuple(TensorUse(binding.slot, given_as=binding.name) for binding in step.outputs)


def shadow_flows(plan: NodePlan) -> Iterator[Flow]:
    """Flows from the node to its shadows."""
    for index, shadow in enumerate(plan.shadows, start=len(plan.steps)):
        yield Flow(None, index, tensors=given(shadow))


def condition_text(condition: Condition) -> str:
    """The condition's source text on one line."""
    return " ".join(condition.source.split())


def when_notes(step: StepPlan) -> tuple[str, ...]:
    """For example ``when inputs.X > 1``, if the step has a ``when``."""
    return (f"when {condition_text(step.when)}",) if step.when is not None else ()


def target_text(action: CallPlan | NodePlan) -> str:
    """For example ``resnet50@3``, ``resnet50`` (any version), ``graph inner/7`` or ``node ab``."""
    if isinstance(action, CallPlan):
        return action.model_name + (f"@{action.model_version}" if action.model_version else "")
    return f"graph {action.graph}" if action.graph else f"node {action.name}"


def slot_name(node: NodePlan, slot: int) -> str:
    """Name of the tensor in a slot of the node's frame; "" if it has none."""
    spec = node.specs.get(slot)
    if spec is not None:
        return spec.name
    return next((binding.name for binding in (*node.inputs, *node.outputs) if binding.slot == slot), "")


def share(weight: float, total: float) -> str:
    """For example ``90 %``; 0 % and 100 % only if exact."""
    percent = 100 * weight / total if total > 0 else 0.0
    text = f"{percent:.3g}"
    if text == "100" and weight < total:
        return "> 99.9 %"
    return f"{text} %" if text != "0" or not weight else "< 0.01 %"


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cases_text(cases: Sequence[str]) -> str:
    """``"de", "nl"``."""
    return ", ".join(json.dumps(case, ensure_ascii=False) for case in cases)


MAX_SHOWN_CHARS = 60
_MAX_SHOWN_ELEMENTS = 8


def shortened(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """``text`` on one line, of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shape_text(dims: tuple[int, ...], *, is_batched: bool) -> str:
    """``[batch, 3, -1]``; -1 is any size."""
    return f"[{', '.join([*(['batch'] if is_batched else []), *map(str, dims)])}]"


def tensor_text(spec: TensorSpec, *, is_batched: bool) -> str:
    """``LANG BYTES [batch, 1]``; only the name where the type is not known."""
    return f"{spec.name} {spec.datatype} {shape_text(spec.dims, is_batched=is_batched)}" if spec.datatype else spec.name


def value_text(tensor: WireTensor) -> str:
    """The first elements of a tensor: ``"en"``, ``[0, 0.5]``."""
    elements = decode(tensor).ravel()[: _MAX_SHOWN_ELEMENTS + 1].tolist()
    values = [e.decode(errors="replace") if isinstance(e, bytes) else e for e in elements]
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    if len(texts) == 1:
        return shortened(texts[0])
    return shortened(f"[{', '.join(texts[:_MAX_SHOWN_ELEMENTS])}{', …' if len(texts) > _MAX_SHOWN_ELEMENTS else ''}]")


def limit_texts(timeout_ms: int, max_inflight: int) -> list[str]:
    """``timeout 400 ms`` and ``at most 8 in flight``, if set."""
    return [
        *([f"timeout {timeout_ms} ms"] if timeout_ms else []),
        *([f"at most {max_inflight} in flight"] if max_inflight else []),
    ]


def policy_texts(step: StepPlan) -> list[str]:
    """The policies of a step, in the order in which they act."""
    texts = limit_texts(step.timeout_ms, step.max_inflight)
    if step.min_remaining_ms:
        texts.append(f"needs {step.min_remaining_ms} ms left")
    return texts + [policy.text() for policy in step.policies]


def value_texts(step: StepPlan, frame: NodePlan) -> list[str]:
    """``LIMIT is 0.8`` for each constant, ``LANG defaults to "en"`` for each default of a step of ``frame``."""
    return [f"{name} is {value_text(tensor)}" for name, tensor, _ in step.constants] + [
        f"{slot_name(frame, slot)} defaults to {value_text(tensor)}" for slot, tensor, _ in step.defaults
    ]
