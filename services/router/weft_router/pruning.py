"""A sequence without the steps that only feed outputs nobody asked for."""

from collections.abc import Collection
from dataclasses import replace

from weft_router.graph.plan import NodePlan


def live_steps(plan: NodePlan, wanted: Collection[str]) -> list[int]:
    """Indexes of the steps of a sequence that the outputs ``wanted`` depend on, ascending."""
    producers = {binding.slot: index for index, step in enumerate(plan.steps) for binding in step.outputs}
    live: set[int] = set()
    unread = [slot for name, slot in plan.outputs if name in wanted]
    while unread:
        index = producers.get(unread.pop())
        if index is not None and index not in live:
            live.add(index)
            unread += [binding.slot for binding in plan.steps[index].inputs]
    return sorted(live)


def pruned(plan: NodePlan, live: Collection[int]) -> NodePlan:
    """The sequence with those steps alone; slots stay as they are, outputs of the others stay absent.

    Args:
        plan: A sequence.
        live: As ``live_steps`` gives them, so that no step waits for one that is left out.
    """
    position = {index: place for place, index in enumerate(live)}
    steps = [
        replace(plan.steps[i], consumers=tuple(position[c] for c in plan.steps[i].consumers if c in position))
        for i in live
    ]
    return replace(plan, steps=tuple(steps))
