"""The requested outputs of a graph: which steps run for them, and where they are afterwards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.base.core import RequestedOutput
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, GraphPlan, Reshaping
from weft.language.pruning import live_steps
from weft.router.reporting.path import UsualPath
from weft.router.requests.intermediates import Intermediate, Intermediates
from weft.router.steps import Node, PrunableNode, Run, across
from weft.router.tensors.adaption import fitted_output, full_rank

#: Selections that a graph keeps; the oldest goes first.
MAX_SELECTIONS = 64


class Selection(NamedTuple):
    """A set of requested outputs.

    Attributes:
        node: The root with the steps that they need.
        names: Of the outputs, in the order in which they are answered.
        slots: For each of the graph's own outputs its slot in the root's frame, its rank there, and what gives it
            the dims that clients see, where these differ.
        keys: For each intermediate tensor the key that steps keep it under.
        captures: Outputs that steps keep, by the step's path; None for nothing.
        usual_path: Of a request in which every step answers; None where the request decides.
    """

    node: Node
    names: tuple[str, ...]
    slots: Mapping[str, tuple[int, int | None, Reshaping | None]]
    keys: Mapping[str, str]
    captures: Mapping[str, tuple[str, ...]] | None
    usual_path: UsualPath | None

    def outputs(self, run: Run) -> dict[str, WireTensor]:
        """The outputs that have a value after a run of ``node``."""
        frame, captured = run.frame, run.request.captured
        outputs: dict[str, WireTensor] = {}
        for name in self.names:
            if name in self.slots:
                slot, rank, reshaping = self.slots[name]
                tensor = frame[slot]
                if tensor is not None and rank is not None and len(tensor.shape) != rank:
                    tensor = fitted_output(tensor, rank)
                if reshaping is not None and tensor is not None:
                    tensor = across(tensor, reshaping)
            else:
                tensor = captured.get(self.keys[name])
            if tensor is not None:
                outputs[name] = tensor
        return outputs


class Selections:
    """Computes selections, once for each set of outputs.

    Where the root can leave steps out, those that the outputs do not need are. Intermediate tensors are outputs as
    any other: a request for them alone runs what they need and no more.

    Args:
        plan: The graph.
        root: Its root.

    Attributes:
        all: Of a request that names no output.
    """

    def __init__(self, plan: GraphPlan, root: Node) -> None:
        self._root = root
        self.intermediates = Intermediates(plan.root, [spec.name for spec in plan.signature.outputs])
        is_batching = plan.signature.max_batch_size > 0
        ranks = {spec.name: full_rank(spec, is_batching=is_batching) for spec in plan.signature.outputs}
        by_slot = {one.slot: one for one in plan.root.reshaped_outputs}
        inside = {name: by_slot[slot] for name, slot in plan.root.outputs if slot in by_slot}
        ranks |= {name: len(one.source) + is_batching for name, one in inside.items()}
        self._slots = {name: (slot, ranks.get(name), inside.get(name)) for name, slot in plan.root.outputs}
        self.all = self._made(tuple(self._slots), is_whole=True)
        self._known: dict[tuple[str, ...], Selection] = {}

    def of(self, requested: Sequence[RequestedOutput]) -> Selection:
        """The selection of a request that names outputs."""
        names = tuple(dict.fromkeys([output.name for output in requested]))
        found = self._known.get(names)
        if found is None:
            if len(self._known) >= MAX_SELECTIONS:
                del self._known[next(iter(self._known))]
            found = self._known[names] = self._made(names, is_whole=False)
        return found

    def _made(self, names: tuple[str, ...], *, is_whole: bool) -> Selection:
        asked = {name: found for name in names if (found := self.intermediates.get(name)) is not None}
        keys = {name: found.key for name, found in asked.items()}
        node = self._root
        if isinstance(node, PrunableNode) and not is_whole:
            also = {found.root_step for found in asked.values()}
            node = node.only(live_steps(node.plan, [name for name in names if name in self._slots], also))
        captures = _captures(asked.values()) if asked else None
        return Selection(node, names, self._slots, keys, captures, _usual_path(node))


def _usual_path(node: Node) -> UsualPath | None:
    """That of calls which follow one another."""
    chain = node.chain
    if chain is None or not all(isinstance(step.plan.action, CallPlan) for step in chain):
        return None
    return UsualPath(len(chain))


def _captures(asked: Iterable[Intermediate]) -> Mapping[str, tuple[str, ...]]:
    """Path of each step -> its outputs, in an order that does not depend on the request's."""
    captures: dict[str, tuple[str, ...]] = {}
    for path, output in sorted({(found.path, found.output) for found in asked}):
        captures[path] = (*captures.get(path, ()), output)
    return captures
