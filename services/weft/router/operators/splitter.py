"""The splitter: runs one of its steps, drawn by weight or chosen by a bandit from feedback."""

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import log
from operator import attrgetter
from typing import Any, ClassVar

from opentelemetry.trace import get_current_span
from typing_extensions import override

from weft.base.text.argument_types import time_s
from weft.base.text.pbtxt import suggestion
from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.checks.fields import check_choices
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.compiler.state import CODE as STATE
from weft.language.compiler.state import stateful_model
from weft.language.description import condition_text, counted, share
from weft.language.path_form import PathForm
from weft.language.plan import Condition, Description, End
from weft.language.rollouts import RolloutPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.router.bandits.store import Pull, Scores
from weft.router.operators.alternatives import AlternativesKind, AlternativesNode, branch_flows, only_branch
from weft.router.reporting.path import SKIPPED, StepRecord
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.machine import begin, weights_now
from weft.router.steps.node import Node, NodeParts, OperatorPlan
from weft.router.steps.responses import stream_of
from weft.router.steps.run import Run
from weft_protos import graph_pb2 as pb

_DEFAULT_EPSILON = 0.1
_STICKY_BY = Purpose("sticky_by", ("string", "int"))
#: Limit of a rollout's guard -> the greatest value; all are above 0.
_GREATEST = {"max_error_rate": 1.0, "max_p99_ms": 1e9, "max_p99_ratio": 1e9, "min_score": 1.0, "min_agreement": 1.0}


@dataclass(frozen=True, slots=True)
class SplitterPlan(OperatorPlan):
    """A splitter.

    Attributes:
        sticky_by: Equal values draw the same step; None: drawn at random.
        salt: Hashed together with that value.
        bandit: Adapts the shares to feedback; None: the weights are the shares.
        rollout: Raises the share of a new step; None: the shares stay.
    """

    kind: ClassVar[str] = "splitter"
    path_form: ClassVar[PathForm] = PathForm.of("[", "]", only_branch)
    can_be_pinned: ClassVar[bool] = True

    sticky_by: Condition | None = None
    salt: str = ""
    bandit: BanditPlan | None = None
    rollout: RolloutPlan | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the steps, at first."""
        weights = tuple(step.weight for step in self.steps)
        return weights if self.rollout is None else weights_now(self.rollout, begin(self.rollout, 0))

    @property
    @override
    def conditions(self) -> tuple[Condition, ...]:
        return () if self.sticky_by is None else (self.sticky_by,)

    @override
    def node(self, parts: NodeParts) -> Node:
        return SplitterNode(self, parts)

    @override
    def describe(self) -> Description:
        total = sum(self.weights)
        notes = [f"sticky by {condition_text(self.sticky_by)}"] if self.sticky_by is not None else []
        notes += [f"salt {self.salt}"] if self.salt else []
        if self.bandit is not None:
            name, epsilon = self.bandit.algorithm.name, f", epsilon {self.bandit.epsilon:g}"
            notes.append(f"{name}{epsilon * self.bandit.algorithm.takes_epsilon}")
            if self.bandit.min_pulls:
                notes.append(f"first {counted(self.bandit.min_pulls, 'request')} for each by weight")
        notes += [self.rollout.text()] if self.rollout is not None else []
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("one by weight" if self.bandit is None else "one by feedback", tuple(notes)),
            exit=End("its answer"),
            flows=branch_flows(self, [share(weight, total) for weight in self.weights]),
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
        rollout = _rollout(scope) if message.HasField("rollout") else None
        return {"sticky_by": sticky_by, "salt": message.salt, "bandit": bandit, "rollout": rollout}

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
        if splitter.HasField("rollout"):
            for where, text in _faults(node):
                report.error("G042", file, f"{path}.rollout{where}", text)
            idle = [] if splitter.HasField("bandit") else [step for step in node.steps if step.name == _candidate(node)]
            for step in idle:
                why = "on the candidate of a rollout, whose 'steps' are its shares"
                report.refuse(file, step.path, [("weight", f"{step.path}.weight" in file.positions)], why)


def _check_sequences(builder: NodeBuilder, scope: Scope) -> None:
    """Report a random split that sends requests of one sequence to different steps."""
    path = scope.node.kind_path
    found = stateful_model(scope.names.steps, builder.names)
    if not found or "sequence_id" in scope.node.message.splitter.sticky_by:
        return
    for field in ("sticky_by", "bandit", "rollout"):
        if f"{path}.{field}" in scope.file.positions:
            text = (
                f"{found} keeps the state of sequences (sequence_batching), and '{field}' sends the requests "
                "of one sequence to different steps; leave it out: without it a sequence stays with its step"
            )
            builder.report.error(STATE, scope.file, f"{path}.{field}", text, is_name=True)


def _candidate(node: NodeDefinition) -> str:
    return node.message.splitter.rollout.candidate or node.steps[-1].name


def _faults(node: NodeDefinition) -> Iterator[tuple[str, str]]:
    """What is wrong with a rollout: (the field, a message)."""
    rollout, names = node.message.splitter.rollout, [step.name for step in node.steps]
    guard, shares, has_bandit = rollout.guard, list(rollout.steps), node.message.splitter.HasField("bandit")
    if len(names) < 2:
        yield "", "a rollout compares its candidate with other steps; add the step that serves today"
    others = [step.message for step in node.steps if step.name != _candidate(node)]
    if others and all(step.HasField("weight") and step.weight == 0 for step in others):
        yield "", "every step but the candidate has weight 0, and serves whom it does not; one must be above 0"
    if _candidate(node) not in names:
        text = f"'{node.name}' has no step '{rollout.candidate}', which 'candidate' names"
        yield ".candidate", text + suggestion(rollout.candidate, names)
    if has_bandit and shares:
        yield ".steps", "'steps' are the candidate's shares, and here the 'bandit' sets them; leave out one of the two"
    elif not has_bandit and not (shares and shares == sorted({*shares}) and shares[0] > 0 and shares[-1] <= 100):
        shown = ", ".join(f"{share:g}" for share in shares)
        yield ".steps", f"'steps' are [{shown}]; give rising shares in percent, above 0 to 100: [5, 20, 50, 100]"
    if rollout.every and time_s(rollout.every) is None:
        yield ".every", f"'every' is '{rollout.every}'; give a time with its unit: '30s', '10m' or '2h'"
    limits = [(field.name, value) for field, value in guard.ListFields() if field.name in _GREATEST]
    if not limits:
        yield ".guard" * rollout.HasField("guard"), f"a rollout needs a limit in its 'guard': {', '.join(_GREATEST)}"
    if guard.false_alarm_rate:
        limits.append(("false_alarm_rate", guard.false_alarm_rate))
    for name, value in limits:
        if not 0 < value <= _GREATEST.get(name, 0.5):
            yield f".guard.{name}", f"'{name}' is {value:g}; give a number above 0 to {_GREATEST.get(name, 0.5):g}"
    runs = attrgetter("message.model_name", "message.model_version", "message.node")
    compared = {runs(one) for one in node.shadows if one.message.shadow.HasField("mirror_compare")}
    mine = {runs(one) for one in node.steps if one.name == _candidate(node)}
    if guard.HasField("min_agreement") and not compared:
        cure = "give the splitter a step with 'shadow { percent: 10 mirror_compare { } }'"
        yield ".guard.min_agreement", f"'min_agreement' needs answers that are compared; {cure}"
    elif guard.HasField("min_agreement") and shares == [100] and compared == mine:
        yield ".guard.min_agreement", "at 100 % a shadow of the candidate compares nothing; begin with a smaller share"


def _rollout(scope: Scope) -> RolloutPlan | None:
    node, message = scope.node, scope.node.message.splitter.rollout
    found = [index for index, step in enumerate(node.steps) if step.name == _candidate(node)]
    if not found:
        return None
    candidate = node.steps[found[0]].message
    parts = [message, candidate, *(one.message for one in scope.file.all_nodes if candidate.node and one is not node)]
    digest = blake2b(repr([step.name for step in node.steps]).encode(), digest_size=16)
    for part in parts:
        digest.update(part.SerializeToString(deterministic=True))
    return RolloutPlan(
        candidate=_candidate(node),
        index=found[0],
        weights=tuple(one.weight if one.HasField("weight") else 1.0 for one in (step.message for step in node.steps)),
        shares=tuple(share / 100.0 for share in message.steps),
        every_s=time_s(message.every) or 0.0,
        limits={field.name: value for field, value in message.guard.ListFields() if field.name in _GREATEST},
        false_alarm_rate=message.guard.false_alarm_rate or 0.05,
        min_requests=message.guard.min_requests,
        pauses=message.on_failure == pb.Rollout.PAUSE,
        digest=digest.hexdigest(),
    )


class SplitterNode(AlternativesNode):
    """Runs one step: the one that the request is pinned to, else the one drawn.

    The same key always draws the same step; a bandit draws by what it has learned.
    """

    def __init__(self, plan: SplitterPlan, parts: NodeParts) -> None:
        super().__init__(plan, parts)
        self._splitter, self._sticky_by = plan, plan.sticky_by
        self._names = [step.name for step in plan.steps]
        self._index_by_name = {name: index for index, name in enumerate(self._names)}
        graph = parts.error_context.graph
        self._rollout = self._scores = None
        if plan.rollout is not None:
            self._rollout = parts.runtime.rollouts.register(graph, plan.path, plan.rollout)
        if self._rollout is not None and "min_score" in self._rollout.plan.limits:
            count = [self._rollout.arm(index).count_score for index in range(len(plan.steps))]
            self._scores = parts.runtime.bandits.scores[graph, plan.path] = Scores(self._names, count)
        self._split(plan.weights if self._rollout is None else self._rollout.weights)

    @override
    async def run(self, run: Run) -> None:
        rollout, step, request = self._rollout, self._steps[index := self._choose(run)], run.request
        if rollout is None or (request.pins is not None and self.plan.name in request.pins):  # who pins is no evidence
            await step.run(run)
            return
        if rollout.news and (span := get_current_span(run.context)).is_recording():
            span.set_attribute("weft.rollout", rollout.news)
            rollout.news = ""
        if self._scores is not None and request.pulls is not None:
            pull = Pull(self.plan.path, self._scores, index, run=run.record)
            self._runtime.bandits.recent.add(rollout.graph, request.scope.request_id, request.pulls, pull)
        try:
            await step.run(run)
        finally:
            if run.record.steps:
                self._count(rollout.arm(index), run.record.steps[-1], run)

    def _split(self, weights: Sequence[float]) -> None:
        plan, runtime = self._splitter, self._runtime
        self._weights = weights
        self._choice = WeightedChoice(self._names, weights, plan.salt, runtime.generator)
        graph = self._error_context.graph
        self._bandit = None if plan.bandit is None else runtime.bandits.chooser(graph, plan, plan.bandit, weights)

    def _count(self, arm: ArmCounts, record: StepRecord, run: Run) -> None:
        """Count a run for the rollout; a stream when it ends, with the time to its first response.

        A run that was cancelled counts only if its time was up: it is late, and the client has not gone.
        """
        duration_ns = record.end_ns - record.start_ns
        stream = stream_of(record, run) if record.status == "OK" else None
        if stream is not None:
            stream.when_over(lambda _: arm.count(duration_ns, is_ok=record.status in ("OK", "CANCELLED")))
        elif record.status not in (SKIPPED, "CANCELLED") or _is_late(record, run):
            arm.count(duration_ns, is_ok=record.status == "OK")

    def _choose(self, run: Run) -> int:
        request = run.request
        if self._rollout is not None and self._rollout.weights is not self._weights:
            self._split(self._rollout.weights)
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


def _is_late(record: StepRecord, run: Run) -> bool:
    return record.status == "CANCELLED" and run.deadline_ns is not None and record.end_ns >= run.deadline_ns


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
