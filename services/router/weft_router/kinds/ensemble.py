"""An ensemble: all steps at once, and one answer made of theirs."""

from collections.abc import Iterator

from weft_router.graph.description import (
    Description,
    End,
    Flow,
    TensorUse,
    given,
    offered,
    shadow_flows,
    slot_name,
    target_text,
    when_notes,
)
from weft_router.graph.plan import CombinePlan, NodePlan


def describe_ensemble(plan: NodePlan) -> Description:
    """Every step, and how its tensors are combined."""
    customs = [combine.custom for combine in plan.combines if combine.custom is not None]
    notes = [f"{slot_name(plan, combine.output)}: {_combine_text(combine)}" for combine in plan.combines]
    if plan.quorum:
        notes.append(f"quorum {plan.quorum} of {len(plan.steps)}")
    if plan.straggler_ms:
        notes.append(f"stragglers {plan.straggler_ms} ms")
    own_names = {
        binding.slot: spec.name.removeprefix(f"{step.name}.")  # the frame keeps tensors of one name apart: gnn.SCORE
        for step in plan.steps
        for binding in step.outputs
        if (spec := plan.specs.get(binding.slot))
    }
    return Description(
        kind="ensemble",
        steps=(*plan.steps, *plan.shadows, *customs),
        entry=End("all at once"),
        exit=End("first answer" if plan.is_race else "combine", tuple(notes)),
        flows=(*_flows(plan), *shadow_flows(plan)),
        names=own_names,
    )


def _flows(plan: NodePlan) -> Iterator[Flow]:
    first_custom = len(plan.steps) + len(plan.shadows)
    customs = [combine for combine in plan.combines if combine.custom is not None]
    places = {combine.output: first_custom + number for number, combine in enumerate(customs)}
    is_weighted = any(combine.is_weighted for combine in plan.combines)
    for index, step in enumerate(plan.steps):
        weight = [f"weight {step.weight:g}"] if is_weighted else []
        yield Flow(None, index, (*when_notes(step), *weight), given(step))
        outputs = {binding.slot: binding.name for binding in step.outputs}
        for combine in plan.combines:
            for slot in (slot for source, slot in combine.sources if source == index):
                use = TensorUse(slot, given_as=outputs.get(slot, ""))
                yield Flow(index, places.get(combine.output), tensors=(use,), gives=True)
    for combine in customs:
        if combine.custom is not None:
            made = (combine.stack, combine.mask)
            own = tuple(use for use in given(combine.custom) if use.slot not in made)
            if own:
                yield Flow(None, places[combine.output], tensors=own)
            yield Flow(places[combine.output], None, tensors=offered(combine.custom), gives=True)


def _combine_text(combine: CombinePlan) -> str:
    axis = f" on axis {combine.axis}" if combine.method.takes_axis else ""
    by = f" by {target_text(combine.custom.action)}" if combine.custom is not None else ""
    return f"{combine.method.name}{by}{axis}{', weighted' * combine.is_weighted}"
