"""What a step reads, and a pipeline without the steps that only feed outputs that no request wants."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from weft_router.graph.plan import NodePlan, StepPlan


def slots_read(plan: StepPlan) -> list[int]:
    """Slots that a step reads: its inputs, and those of its conditions, its policies and its fallbacks."""
    slots = [binding.slot for binding in plan.inputs]
    for condition in (plan.when, plan.accept, *(policy.condition for policy in plan.policies)):
        if condition is not None:
            slots += [binding.slot for binding in condition.tensors]
    if plan.fallback is not None:
        slots += slots_read(plan.fallback)
    return list(dict.fromkeys(slots))


def live_steps(plan: NodePlan, wanted: Collection[str], also: Collection[int] = ()) -> list[int]:
    """Indexes of the steps of a pipeline that the outputs ``wanted`` and the steps ``also`` depend on, ascending.

    A shadow is among them if all that it reads is there anyway. Outputs that the node itself reads
    are needed by every other.
    """
    read = [slot for name, slot in plan.outputs if name in wanted]
    read += plan.slots_read
    read += [slot for index in also for slot in slots_read(plan.steps[index])]
    live = steps_behind(plan, read).union(also)
    producers = _producers(plan)
    live |= {
        index
        for index, step in enumerate(plan.steps)
        if step.shadow is not None and all(producers.get(slot, index) in live | {index} for slot in slots_read(step))
    }
    return sorted(live)


def steps_behind(plan: NodePlan, slots: Iterable[int]) -> set[int]:
    """Indexes of the steps of a pipeline that give the tensors in ``slots``, and of those that these depend on."""
    producers = _producers(plan)
    found: set[int] = set()
    unread = list(slots)
    while unread:
        index = producers.get(unread.pop())
        if index is not None and index not in found:
            found.add(index)
            unread += slots_read(plan.steps[index])
    return found


def pruned(plan: NodePlan, live: Collection[int]) -> NodePlan:
    """The pipeline with those steps alone; slots stay as they are, outputs of the others stay absent.

    A step that waited for one that is left out, because the file orders the steps, waits for what that one waited for.

    Args:
        plan: A pipeline.
        live: As ``live_steps`` gives them, so that no step reads from one that is left out.
    """
    position = {index: place for place, index in enumerate(live)}
    consumers = {index: _live_consumers(plan, index, position) for index in live}
    num_dependencies = dict.fromkeys(live, 0)
    for followers in consumers.values():
        for follower in followers:
            num_dependencies[follower] += 1
    steps = [
        replace(
            plan.steps[index],
            consumers=tuple(position[follower] for follower in consumers[index]),
            num_dependencies=num_dependencies[index],
        )
        for index in live
    ]
    return replace(plan, steps=tuple(steps))


def _producers(plan: NodePlan) -> dict[int, int]:
    """Slot -> index of the step that fills it."""
    producers = {binding.slot: index for index, step in enumerate(plan.steps) for binding in step.outputs}
    return producers | {step.ok_slot: index for index, step in enumerate(plan.steps) if step.ok_slot >= 0}


def _live_consumers(plan: NodePlan, index: int, live: Collection[int]) -> list[int]:
    """Steps of ``live`` that wait for a step, also through steps that are left out; ascending."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(plan.steps[index].consumers)
    while waiting:
        consumer = waiting.pop()
        if consumer in live:
            found.add(consumer)
        elif consumer not in seen:
            seen.add(consumer)
            waiting += plan.steps[consumer].consumers
    return sorted(found)
