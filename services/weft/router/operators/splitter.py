"""The splitter: runs one of its steps, drawn by weight or chosen by a bandit from feedback."""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import log
from typing import Any, ClassVar

from typing_extensions import override

from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.checks.fields import check_choices
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.compiler.state import CODE as STATE
from weft.language.compiler.state import stateful_model
from weft.language.description import condition_text, counted, share
from weft.language.path_form import PathForm
from weft.language.plan import Condition, Description, End
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.router.operators.alternatives import AlternativesKind, AlternativesNode, branch_flows, only_branch
from weft.router.steps.node import Node, NodeParts, OperatorPlan
from weft.router.steps.run import Run
from weft_protos import graph_pb2 as pb

_DEFAULT_EPSILON = 0.1
_STICKY_BY = Purpose("sticky_by", ("string", "int"))


@dataclass(frozen=True, slots=True)
class SplitterPlan(OperatorPlan):
    """A splitter.

    Attributes:
        sticky_by: Equal values draw the same step; None: drawn at random.
        salt: Hashed together with that value.
        bandit: Adapts the shares to feedback; None: the weights are the shares.
    """

    kind: ClassVar[str] = "splitter"
    path_form: ClassVar[PathForm] = PathForm.of("[", "]", only_branch)
    can_be_pinned: ClassVar[bool] = True

    sticky_by: Condition | None = None
    salt: str = ""
    bandit: BanditPlan | None = None

    @property
    @override
    def conditions(self) -> tuple[Condition, ...]:
        return () if self.sticky_by is None else (self.sticky_by,)

    @override
    def node(self, parts: NodeParts) -> Node:
        return SplitterNode(self, parts)

    @override
    def describe(self) -> Description:
        total = sum(step.weight for step in self.steps)
        notes = [f"sticky by {condition_text(self.sticky_by)}"] if self.sticky_by is not None else []
        notes += [f"salt {self.salt}"] if self.salt else []
        if self.bandit is not None:
            name, epsilon = self.bandit.algorithm.name, f", epsilon {self.bandit.epsilon:g}"
            notes.append(f"{name}{epsilon * self.bandit.algorithm.takes_epsilon}")
            if self.bandit.min_pulls:
                notes.append(f"first {counted(self.bandit.min_pulls, 'request')} for each by weight")
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("one by weight" if self.bandit is None else "one by feedback", tuple(notes)),
            exit=End("its answer"),
            flows=branch_flows(self, [share(step.weight, total) for step in self.steps]),
        )


class SplitterKind(AlternativesKind):
    """The splitter in graph files: fields, checks, compilation."""

    plan = SplitterPlan
    step_fields = frozenset({"weight"})

    @override
    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        return [("sticky_by", message.splitter.sticky_by)]

    @override
    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        message = scope.node.message.splitter
        sticky_by = builder.condition(scope, f"{scope.node.kind_path}.sticky_by", _STICKY_BY)
        _check_sequences(builder, scope)
        given, bandit = message.bandit, None
        if message.HasField("bandit"):
            algorithm = ALGORITHMS[pb.Bandit.Algorithm.Name(given.algorithm)]
            bandit = BanditPlan(algorithm, given.epsilon or _DEFAULT_EPSILON, given.min_pulls)
        return {"sticky_by": sticky_by, "salt": message.salt, "bandit": bandit}

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Report fields that a bandit, a salt or a single step makes useless, and shares that are likely mistakes."""
        splitter, path = node.message.splitter, node.kind_path
        choices = [("sticky_by", bool(splitter.sticky_by)), ("bandit", splitter.HasField("bandit"))]
        check_choices(file, node, choices, report)
        is_idle = bool(splitter.salt) and not splitter.sticky_by
        report.refuse(file, path, [("salt", is_idle)], "without 'sticky_by'")
        if splitter.HasField("bandit"):
            why = "with 'bandit', which draws anew for each request; keep one"
            report.refuse(file, path, [("sticky_by", bool(splitter.sticky_by))], why)
            algorithm = ALGORITHMS[pb.Bandit.Algorithm.Name(splitter.bandit.algorithm)]
            is_idle = bool(splitter.bandit.epsilon) and not algorithm.takes_epsilon
            exploring = sorted(one.name for one in ALGORITHMS.values() if one.takes_epsilon)
            why = f"with {algorithm.name}; it belongs to {' and '.join(exploring)}"
            report.refuse(file, f"{path}.bandit", [("epsilon", is_idle)], why)
        epsilon, where = splitter.bandit.epsilon, f"{path}.bandit.epsilon"
        if not 0 <= epsilon <= 1 or (epsilon == 0 and where in file.positions):
            text = f"'epsilon' is {epsilon:g}; give the share of requests that explore, above 0 to 1, for example 0.1"
            report.error("G025", file, where, text)


def _check_sequences(builder: NodeBuilder, scope: Scope) -> None:
    """Report a random split that sends requests of one sequence to different steps."""
    path = scope.node.kind_path
    found = stateful_model(scope.names.steps, builder.names)
    if not found or "sequence_id" in scope.node.message.splitter.sticky_by:
        return
    for field in ("sticky_by", "bandit"):
        if f"{path}.{field}" in scope.file.positions:
            text = (
                f"{found} keeps the state of sequences (sequence_batching), and '{field}' sends the requests "
                "of one sequence to different steps; leave it out: without it a sequence stays with its step"
            )
            builder.report.error(STATE, scope.file, f"{path}.{field}", text, is_name=True)


class SplitterNode(AlternativesNode):
    """Runs one step: the one that the request is pinned to, else the one drawn.

    The same key always draws the same step; a bandit draws by what it has learned.
    """

    def __init__(self, plan: SplitterPlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._sticky_by = plan.sticky_by
        names, weights = [step.name for step in plan.steps], [step.weight for step in plan.steps]
        self._choice = WeightedChoice(names, weights, plan.salt, parts.runtime.generator)
        self._index_by_name = {name: index for index, name in enumerate(names)}
        graph, bandits = parts.error_context.graph, parts.runtime.bandits
        self._bandit = None if plan.bandit is None else bandits.chooser(graph, plan, plan.bandit)

    @override
    async def run(self, run: Run) -> None:
        await self._steps[self._choose(run)].run(run)

    def _choose(self, run: Run) -> int:
        request = run.request
        if request.pins is not None:
            index = self._index_by_name.get(request.pins.get(self.plan.name, ""))
            if index is not None:
                return index
        if self._bandit is not None:
            return self._bandit(request.scope.request_id, request.pulls, run.record)
        if self._sticky_by is not None:
            key = self._error_context.text(self._sticky_by, run, self.plan.path)
            if key:
                return self._choice.by_key(key)
        if request.is_in_sequence:  # its state is where its first request went
            return self._choice.by_key(str(request.scope.parameters["sequence_id"]))
        return self._choice.by_chance()


class WeightedChoice:
    """Chooses a step with probability weight / sum of weights.

    With a key the choice is weighted rendezvous hashing: each step gets the score ``-weight / ln(h)`` with ``h`` in
    (0, 1) hashed from salt, key and step name; the highest score wins. It depends on nothing else, so every process
    decides alike, and when a weight changes only the keys move that must.

    Args:
        weights: At least 0, one of them above 0; dimensionless.
        salt: Splitters with the same salt and step names decide alike.

    Source:
        C. Schindelhauer, G. Schomaker, "Weighted distributed hash tables", SPAA 2005 (logarithmic method).
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], salt: str, generator: random.Random) -> None:
        self._weights = tuple(weights)
        self._names = [_field(name) for name in names]
        self._salt = _field(salt)
        self._bounds = list(accumulate(weights))
        self._generator = generator

    def by_key(self, key: str) -> int:
        """Index of the step for ``key``."""
        prefix = blake2b(self._salt + _field(key), digest_size=8)
        best, best_score = 0, -1.0
        for index, (name, weight) in enumerate(zip(self._names, self._weights, strict=True)):
            if weight <= 0:
                continue
            state = prefix.copy()
            state.update(name)
            h = (int.from_bytes(state.digest(), "big") + 0.5) / 2.0**64
            score = -weight / log(h) if h < 1.0 else float("inf")
            if score > best_score:
                best, best_score = index, score
        return best

    def by_chance(self) -> int:
        """Index of a step drawn at random; a step of weight 0 is never drawn."""
        return bisect_right(self._bounds, self._generator.random() * self._bounds[-1])


def _field(text: str) -> bytes:
    """Text with its length in front, so that different triples never give the same bytes."""
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
