"""A sequence: a pipeline, whose steps see one another's outputs."""

from collections.abc import Iterator

from weft_router.graph.description import (
    Description,
    End,
    Flow,
    TensorUse,
    condition_text,
    counted,
    given,
    slot_name,
    when_notes,
)
from weft_router.graph.plan import LoopPlan, NodePlan, StepPlan


def describe_sequence(plan: NodePlan) -> Description:
    """The data that passes between the steps, and the loop."""
    flows = [*_data_flows(plan), *([_loop_flow(plan, plan.loop)] if plan.loop else [])]
    optional = [
        {binding.slot for binding in step.outputs} - {default.slot for default in step.defaults}
        for step in plan.steps
        if step.is_soft or step.when is not None
    ]
    return Description(
        kind="sequence",
        steps=plan.steps,
        entry=End("inputs", is_plain=True),
        exit=End("outputs", is_plain=True),
        flows=tuple(flows),
        notes=(f"at most {counted(plan.loop.max_iterations, 'round')}",) if plan.loop else (),
        step_notes={index: when_notes(step) for index, step in enumerate(plan.steps)},
        maybe_absent=frozenset[int]().union(*optional),
    )


def _data_flows(plan: NodePlan) -> Iterator[Flow]:
    producers: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        producers.update((binding.slot, index) for binding in step.outputs)
        if step.ok_slot >= 0:
            producers[step.ok_slot] = index
    joined: set[tuple[int, int]] = set()
    for index, step in enumerate(plan.steps):
        for use in _taken(step):
            source = producers.get(use.slot)
            yield _data_flow(plan, source, index, use)
            if source is not None:
                joined.add((source, index))
    for index, step in enumerate(plan.steps):
        for consumer in step.consumers:
            if (index, consumer) not in joined:
                yield Flow(index, consumer, ("then",))
    for binding in plan.outputs:
        yield _data_flow(plan, producers.get(binding.slot), None, TensorUse(binding.slot, taken_as=binding.name))


def _data_flow(plan: NodePlan, source: int | None, target: int | None, use: TensorUse) -> Flow:
    if source is None:
        return Flow(None, target, tensors=(use,))
    outputs = {binding.slot: binding.name for binding in plan.steps[source].outputs}
    return Flow(source, target, tensors=(use._replace(given_as=outputs.get(use.slot, "")),), gives=True)


def _taken(step: StepPlan) -> list[TensorUse]:
    """What a step reads for its target and for its conditions; each slot once."""
    found = {use.slot: use for use in given(step)}
    key = step.cache.key if step.cache is not None else None
    for what, condition in (("when", step.when), ("cache key", key)):
        for binding in condition.tensors if condition is not None else ():
            found.setdefault(binding.slot, TensorUse(binding.slot, condition=f"{binding.name} (for {what})"))
    return list(found.values())


def _loop_flow(plan: NodePlan, loop: LoopPlan) -> Flow:
    carried = [f"{slot_name(plan, output)} becomes {slot_name(plan, taken)}" for output, taken in loop.carry]
    return Flow(None, None, (f"again while {condition_text(loop.again)}", *carried), is_back=True)
