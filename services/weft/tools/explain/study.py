"""Studies a router node: runs it once for each path, and compares the runs."""

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.base.core import CallContext, RequestedOutput
from weft.base.errors import WeftError
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, encode
from weft.language.description import slot_name
from weft.language.plan import Frame, GraphPlan, NodePlan, StepPlan
from weft.router.reporting.path import SKIPPED, NodeRecord, StepRecord
from weft.router.requests import Selections
from weft.router.steps.node import Node, reshape_slots
from weft.router.steps.run import GraphRequest, Run
from weft.tools.explain.evaluator import Knowledge, Known, Unknown, joined, key_of, placeholder
from weft.tools.explain.paths import (
    Branches,
    Call,
    Decision,
    Evaluation,
    ExecutionPath,
    TimelessLoop,
    follow,
)
from weft.tools.explain.question import Question
from weft.tools.explain.stand_ins import Environment, OneNode, Rewriter

_START_NS = 1 << 60
_NS_PER_MS = 1_000_000


class Study:
    """The paths of a node with given inputs.

    Attributes:
        possible_errors: Errors that unknown values may lead to.
        counted: Paths that decide what is certain. On the others the request ends because a call fails or is late,
            which can happen to every call.
        outputs: Outputs of the node, by slot.
        may_be_empty: Whether it streams, and may give no response.
        calls_nothing: Whether no call is made on any path.
    """

    def __init__(self, node: NodePlan, paths: list[ExecutionPath], *, is_cut: bool) -> None:
        self.paths = paths
        self.is_cut = is_cut
        plain = [path for path in paths if not path.has_trouble]
        self.error = paths[0].error if all(path.error is not None for path in paths) else None
        self.calls_nothing = not any(path.calls for path in paths)
        found = [path.error for path in plain if path.error is not None]
        self.possible_errors: Sequence[WeftError] = [] if self.error else found
        self.counted = [path for path in paths if self.error or path.error is None or not path.has_trouble]
        self._counted = set(map(id, self.counted))
        self._branches = Branches(paths)
        ended = [path for path in self.counted if path.error is None]
        done = [path for path in ended if not path.is_empty] or ended
        self.may_be_empty = len(done) < len(ended) or any(path.is_empty for path in done)
        self.outputs: Mapping[int, WireTensor | None] = {
            slot: joined(_given(path, slot, node) for path in done) for _, slot in node.outputs
        }

    def runs(self, step: StepPlan) -> list[list[StepRecord]]:
        """For each path, the records of a step that ran."""
        return [
            [record for record in path.record.steps if record.name == step.name and record.status != SKIPPED]
            for path in self.paths
        ]

    def calls(self, step: StepPlan) -> list[Call]:
        """Calls of a step's stand-in, on all paths."""
        return [call for path in self.paths for call in path.calls if call.step is step]

    def is_certain(self, holds: Sequence[bool]) -> bool:
        """Whether a property, given for each path, holds on all counted ones."""
        return all(value for path, value in zip(self.paths, holds, strict=True) if id(path) in self._counted)

    def deciding(self, holds: Sequence[bool]) -> list[Decision]:
        """The decisions that a property, given for each path, depends on."""
        counted = [id(path) in self._counted for path in self.paths]
        return self._branches.deciding(
            [value if is_counted else None for value, is_counted in zip(holds, counted, strict=True)]
        )

    def evaluations(self, owner: StepPlan | NodePlan, name: str) -> list[Evaluation]:
        """Results of a condition on all paths."""
        return [one for path in self.paths for one in path.verdicts.get((id(owner), name), ())]


class Studies:
    """Studies the nodes of a graph for one request."""

    def __init__(self, plan: GraphPlan, question: Question) -> None:
        self._environment = Environment(question.evaluator, self._outcome, question.gives)
        self._rewriter = Rewriter(self._environment)
        self._question = question
        self._root = self._rewriter.node(plan.root)
        self._assembly = OneNode(replace(plan, root=self._root, cache=None), self._rewriter)
        selections = Selections(self._assembly.plan, self._assembly.opened(self._root))
        asked = [RequestedOutput(name, {}) for name in question.outputs]
        self._selection = selections.of(asked) if asked else selections.all
        self._nodes: dict[int, Node] = {id(self._root): self._selection.node}
        self._known: dict[Hashable, Study] = {}
        self._loop = TimelessLoop()
        live = {step.name for step in self._selection.node.plan.steps}
        #: Names of the root's steps that no output asked for needs.
        self.pruned = {step.name for step in plan.root.steps if step.name not in live}

    def close(self) -> None:
        """Release the event loop; no more studies."""
        self._loop.close()

    def root(self, limit_ms: float | None) -> Study:
        """Study the root, with the inputs of the request."""
        frame: Frame = [None] * self._root.num_slots
        for name, slot in self._root.inputs:
            frame[slot] = self._question.inputs.get(name)
        reshape_slots(frame, self._root.reshaped_inputs)
        return self._study(self._root, frame, None if limit_ms is None else int(limit_ms * _NS_PER_MS))

    def inside(self, step: StepPlan, study: Study) -> Study:
        """Study the node that a step runs, with the inputs of all its runs."""
        plan, calls = self._rewriter.nodes[id(step)], study.calls(step)
        frames = [call.frame for call in calls if call.frame is not None]
        limits = [call.limit_ns for call in calls]
        limit_ns = None if None in limits else max((limit for limit in limits if limit is not None), default=None)
        return self._study(plan, [joined(tensors) for tensors in zip(*frames, strict=True)], limit_ns)

    def _outcome(self, plan: NodePlan, frame: Frame, limit_ns: int | None) -> Study | None:
        return self._known.get(_key(plan, frame, limit_ns))

    def _study(self, plan: NodePlan, frame: Frame, limit_ns: int | None) -> Study:
        key = _key(plan, frame, limit_ns)
        if key not in self._known:
            if id(plan) not in self._nodes:
                self._nodes[id(plan)] = self._assembly.opened(plan)
            paths, is_cut = follow(lambda script: self._followed(script, plan, frame, limit_ns), _facts)
            self._known[key] = Study(plan, paths, is_cut=is_cut)
        return self._known[key]

    def _followed(self, script: tuple[int, ...], plan: NodePlan, frame: Frame, limit_ns: int | None) -> ExecutionPath:
        """Follow the path of a script; study inner nodes on it first."""
        while True:
            path = ExecutionPath(script, _START_NS, NodeRecord(plan.name, plan.path_form), frame.copy())
            for slot in plan.counts_read:
                path.frame[slot] = _counted(path, plan, path.frame[slot])
            self._environment.path = path
            self._loop.run_until_complete(self._run(path, plan, limit_ns))
            if path.missing is None:
                return path
            self._study(*path.missing)

    async def _run(self, path: ExecutionPath, plan: NodePlan, limit_ns: int | None) -> None:
        scope, selection = self._question.evaluator.scope, self._selection
        request = GraphRequest(scope, {}, CallContext(), pins=self._question.pins, captures=selection.captures)
        run = Run(path.frame, request, None if limit_ns is None else _START_NS + limit_ns, None, path.record)
        try:
            node = self._nodes[id(plan)]
            if plan.streams:
                path.is_empty = True
                async with contextlib.aclosing(node.responses(run)) as responses:
                    async for response in responses:
                        path.frame[:], path.is_empty = response.frame, False
            else:
                await node.run(run)
        except WeftError as error:
            path.is_unclear = error.code == "INTERNAL"  # of placeholders that do not fit together
            path.error = None if path.is_unclear else error
        for copy in path.copies:
            await copy


def _key(plan: NodePlan, frame: Frame, limit_ns: int | None) -> Hashable:
    return id(plan), tuple(key_of(frame[slot]) for _, slot in plan.inputs), limit_ns


def _counted(path: ExecutionPath, plan: NodePlan, tensor: WireTensor | None) -> WireTensor | None:
    """A tensor that says how much a node has to do; where only a model knows, all that there may be, or nothing."""
    if not isinstance(tensor, Unknown):
        return tensor
    is_nothing = path.ask((id(plan), tensor.known.origins), tensor.known.origins)
    return encode(np.zeros(tensor.shape, NUMPY_BY_DATATYPE[tensor.datatype])) if is_nothing else None


def _given(path: ExecutionPath, slot: int, node: NodePlan) -> WireTensor | None:
    """The tensor that a path leaves in a slot; of a computed one only the type is known."""
    tensor = path.frame[slot]
    if path.is_unclear and tensor is None and slot in node.specs:
        return placeholder(node.specs[slot], None, f"{node.specs[slot].name} of {node.name}", is_open=True)
    if tensor is None or isinstance(tensor, (Known, Unknown)):
        return tensor
    sources = [one.known for one in path.frame if isinstance(one, Unknown)]
    is_sized = all(min(source.shape, default=0) >= 0 for source in sources)
    known = Knowledge(
        tensor.shape if is_sized else (-1,) * len(tensor.shape),
        (f"{slot_name(node, slot)} of {node.name}",),
        any(source.may_be_absent for source in sources),
    )
    return Unknown.of(tensor.datatype, known, tensor.shape)


def _facts(path: ExecutionPath) -> set[Hashable]:
    facts: set[Hashable] = {("error", path.error.message) if path.error else "ends"}
    facts.update(("runs", step.name, step.status, step.is_missing) for step in path.record.steps)
    facts.update(("cancelled", name) for name in path.cancelled)
    facts.update((site, tuple(one.verdicts)) for site, found in path.verdicts.items() for one in found)
    for call in path.calls:
        facts.add((id(call.step), call.limit_ns, None if call.frame is None else tuple(map(key_of, call.frame))))
    if path.error is None:
        facts.update((slot, key_of(tensor)) for slot, tensor in enumerate(path.frame))
    return facts
