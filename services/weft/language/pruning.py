"""Removes steps of a pipeline whose outputs a request does not need."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from weft.language.plan import NodePlan, StepPlan

AnyPlan = TypeVar("AnyPlan", bound=NodePlan)


def slots_read(plan: StepPlan) -> list[int]:
    """Slots that a step reads: its inputs, and those of its conditions, policies and fallbacks."""
    slots = []
    for step in plan.chain():
        slots += [binding.slot for binding in step.inputs]
        for condition in (step.when, step.accept, *(policy.condition for policy in step.policies)):
            if condition is not None:
                slots += [binding.slot for binding in condition.tensors]
    return list(dict.fromkeys(slots))


def live_steps(plan: NodePlan, wanted: Collection[str], also: Collection[int] = ()) -> list[int]:
    """Indexes of the steps of a pipeline on which the outputs ``wanted`` and the steps ``also`` depend, ascending.

    A shadow is included if everything that it depends on is. Outputs that the node itself reads, and steps that it
    waits for before answering, are always needed.
    """
    slots = [slot for name, slot in plan.outputs if name in wanted]
    slots += plan.slots_read
    producers = _producers(plan)
    ends = {*also, *(index for index, step in enumerate(plan.steps) if step.is_awaited)}
    ends.update(producers[slot] for slot in slots if slot in producers)
    live = reached(ends, lambda index: _needs(plan.steps[index], producers))
    live |= {
        index for index, step in enumerate(plan.steps) if step.shadow is not None and _needs(step, producers) <= live
    }
    return sorted(live)


def steps_before(plan: NodePlan, index: int) -> set[int]:
    """Indexes of the steps of a pipeline on which one depends, directly or not."""
    producers = _producers(plan)
    return reached([index], lambda other: _needs(plan.steps[other], producers)) - {index}


def reached(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """Everything reachable from ``starts``, these included."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _needs(step: StepPlan, producers: Mapping[int, int]) -> set[int]:
    """Steps that a step reads from or follows; ``producers`` is slot -> index of the step that fills it."""
    return {producers[slot] for slot in slots_read(step) if slot in producers}.union(step.after)


def pruned(plan: AnyPlan, live: Collection[int]) -> AnyPlan:
    """The pipeline with only the ``live`` steps; slots are unchanged, outputs of other steps stay absent.

    A step that waited for a removed one waits for the predecessors of that.

    Args:
        live: From ``live_steps``, so that no step reads from a removed one.
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
            after=tuple(position[other] for other in plan.steps[index].after if other in position),
        )
        for index in live
    ]
    return replace(plan, steps=tuple(steps))


def _producers(plan: NodePlan) -> dict[int, int]:
    producers = {binding.slot: index for index, step in enumerate(plan.steps) for binding in step.outputs}
    return producers | {step.ok_slot: index for index, step in enumerate(plan.steps) if step.ok_slot >= 0}


def _live_consumers(plan: NodePlan, index: int, live: Collection[int]) -> list[int]:
    """Steps of ``live`` that wait for a step, also indirectly through removed steps; ascending."""
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
