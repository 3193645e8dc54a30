"""Names that the steps of one node share: its inputs and outputs."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weft.language.types.signatures import dims_fit
from weft.tools.convert.draft import DraftNode, DraftStep, DraftTensor, check
from weft.tools.convert.yaml_tree import Source


class Interface(NamedTuple):
    """Inputs, outputs and batch size of a step's target."""

    inputs: dict[str, DraftTensor]
    outputs: dict[str, DraftTensor]
    max_batch_size: int = 0


def shared_inputs(steps: list[DraftStep], interfaces: list[Interface]) -> dict[str, DraftTensor]:
    """Inputs of all steps; if each takes one tensor under a different name, the first step's name is used."""
    required = [[n for n, t in one.inputs.items() if not t.is_optional] for one in interfaces]
    if all(len(names) == 1 for names in required) and len({names[0] for names in required}) > 1:
        first, name = interfaces[0], required[0][0]
        for step, one, (own,) in zip(steps, interfaces, required, strict=True):
            if own != name and fits(first.inputs[name], one.inputs[own]):
                step.input_map[own] = name
    return merged(
        {step.input_map.get(name, name): tensor for name, tensor in one.inputs.items()}
        for step, one in zip(steps, interfaces, strict=True)
    )


def shared_outputs(
    source: Source, node: DraftNode, steps: list[DraftStep], interfaces: list[Interface]
) -> dict[str, DraftTensor]:
    """Outputs that every step gives; if each gives one under a different name, the first step's name is used."""
    answering = [(s, one.outputs) for s, one in zip(steps, interfaces, strict=True) if not s.shadow_percent]
    if not answering:
        return {}
    first = answering[0][1]
    common = {n: t for n, t in first.items() if all(n in outputs for _, outputs in answering)}
    if common or not first:
        return common
    if all(len(outputs) == 1 for _, outputs in answering):
        name, tensor = next(iter(first.items()))
        if all(fits(next(iter(outputs.values())), tensor) for _, outputs in answering):
            for step, outputs in answering[1:]:
                own = next(iter(outputs))
                if own != name:
                    step.output_map[own] = name
            return {name: tensor}
    shown = "; ".join(f"'{step.name}' gives {listed(outputs)}" for step, outputs in answering)
    text = f"any one of these steps answers, so they need an output of the same name: {shown}"
    check(source, node.value, node.remarks, text)
    return {}


def merged(many: Iterable[Mapping[str, DraftTensor]]) -> dict[str, DraftTensor]:
    """All tensors by name; one that any of them requires is required."""
    found: dict[str, DraftTensor] = {}
    for tensors in many:
        for name, tensor in tensors.items():
            if name not in found or found[name].is_optional:
                found[name] = tensor
    return found


def fits(produced: DraftTensor, used: DraftTensor) -> bool:
    """Whether datatype and shape agree, with or without the batch dimension."""
    is_shape = dims_fit(produced.dims, used.dims) or dims_fit(produced.full_dims, used.full_dims)
    return produced.datatype == used.datatype and is_shape


def listed(names: Iterable[str]) -> str:
    """Names in quotes."""
    return ", ".join(f"'{name}'" for name in names) or "none"
