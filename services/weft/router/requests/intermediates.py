"""Tensors between the steps of a graph, which a request may ask for as outputs: ``<step>/<tensor>``.

``<step>`` is the step's path without the root node's name, ``<tensor>`` an output of the step's target by its own name:
``lid/LANG``, ``clf/by_language[de]/PROBS``, ``clf>xlmr/PROBS`` for a fallback. A step that did not run, or did not
answer, leaves its tensor out of the response. Inside a node with ``per_row`` the tensor has the rows that the step was
given, in their order; in a loop it is that of the last round.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from weft.base.core import RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import suggestion
from weft.language.plan import CallPlan, NodePlan, StepPlan


class Intermediate(NamedTuple):
    """One tensor.

    Attributes:
        path: Of the step that gives it.
        output: Of the step's target.
        root_step: Index of the step of the root that it lies in; -1 where the root runs as a whole.
    """

    path: str
    output: str
    root_step: int

    @property
    def key(self) -> str:
        """The key that steps keep it under."""
        return f"{self.path}/{self.output}"


class Intermediates:
    """Every tensor of a graph that can be requested by the step that gives it.

    Args:
        root: The graph's root node.
        outputs: Names of the graph's own outputs; these come first where a name is both.
    """

    def __init__(self, root: NodePlan, outputs: Collection[str]) -> None:
        self._outputs = outputs
        self._by_name: dict[str, Intermediate] = {}
        for index, step in enumerate(root.steps):
            self._add(step, index, root.path)
        for custom in root.customs:
            self._add(custom, -1, root.path)

    def get(self, name: str) -> Intermediate | None:
        """The tensor of that name; None for an output of the graph itself."""
        return None if name in self._outputs else self._by_name.get(name)

    def own_outputs(self, requested: tuple[RequestedOutput, ...], graph: str) -> tuple[RequestedOutput, ...]:
        """What is requested of the graph's own outputs; what has no ``/`` is taken for one.

        Raises:
            InvalidArgumentError: A name with ``/`` is neither an output nor an intermediate tensor of the graph.
        """
        if all("/" not in output.name for output in requested):
            return requested
        for name, _ in requested:
            if "/" in name and name not in self._outputs and name not in self._by_name:
                hint = suggestion(name[:200], (*self._outputs, *self._by_name))
                raise InvalidArgumentError(
                    f"unexpected inference output '{name[:200]}' for model '{graph}': no step of the graph gives such "
                    f"a tensor{hint}"
                )
        return tuple(output for output in requested if self.get(output.name) is None)

    def _add(self, step: StepPlan, index: int, root: str) -> None:
        for inner, outputs in steps_within(step):
            name = inner.path.removeprefix(root).removeprefix("/")
            for output in outputs:
                self._by_name.setdefault(f"{name}/{output}", Intermediate(inner.path, output, index))


def steps_within(step: StepPlan) -> Iterator[tuple[StepPlan, list[str]]]:
    """The step, its fallbacks and all steps inside, with the outputs of their targets; shadows are left out."""
    if step.shadow is not None:
        return
    action = step.action
    if isinstance(action, CallPlan):
        yield step, [spec.name for spec in action.signature.outputs]
    else:
        yield step, [binding.name for binding in action.outputs]
        for inner in (*action.steps, *action.customs):
            yield from steps_within(inner)
    if step.fallback is not None:
        yield from steps_within(step.fallback)
