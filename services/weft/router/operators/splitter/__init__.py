"""A splitter: alternatives, of which one is drawn by weight, or chosen by what feedback has taught."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.checks.fields import check_choices
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.compiler.state import CODE as STATE
from weft.language.compiler.state import stateful_model
from weft.language.description import condition_text, counted, given, offered, shadow_flows, share
from weft.language.path_form import PathForm
from weft.language.plan import Condition, Description, End, Flow
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.router.operators.alternatives import AlternativesKind, only_branch
from weft.router.operators.splitter.run import SplitterNode
from weft.router.steps import Node, NodeParts, OperatorPlan
from weft_protos import graph_pb2 as pb

_DEFAULT_EPSILON = 0.1
_STICKY_BY = Purpose("sticky_by", ("string", "int"))


@dataclass(frozen=True, slots=True)
class SplitterPlan(OperatorPlan):
    """A splitter.

    Attributes:
        sticky_by: Equal values draw the same step; None: drawn at random.
        salt: Part of the draw by a value.
        bandit: Feedback moves the shares; None: they are the weights.
    """

    kind: ClassVar[str] = "splitter"
    path_form: ClassVar[PathForm] = PathForm.of("[", "]", only_branch)
    can_be_pinned: ClassVar[bool] = True

    sticky_by: Condition | None = None
    salt: str = ""
    bandit: BanditPlan | None = None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The value that draws the same step."""
        return () if self.sticky_by is None else (self.sticky_by,)

    @override
    def node(self, parts: NodeParts) -> Node:
        return SplitterNode(self, parts, self.sticky_by, self.salt)

    def describe(self) -> Description:
        """The share of each step."""
        total = sum(step.weight for step in self.steps)
        flows: list[Flow] = []
        for index, step in enumerate(self.steps):
            flows.append(Flow(None, index, (share(step.weight, total),), given(step)))
            flows.append(Flow(index, None, tensors=offered(step), gives=True))
        notes = [
            *([f"sticky by {condition_text(self.sticky_by)}"] if self.sticky_by is not None else []),
            *([f"salt {self.salt}"] if self.salt else []),
            *(_bandit_notes(self.bandit) if self.bandit is not None else []),
        ]
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("one by weight" if self.bandit is None else "one by feedback", tuple(notes)),
            exit=End("its answer"),
            flows=(*flows, *shadow_flows(self)),
        )


class SplitterKind(AlternativesKind):
    """Splitters in a file."""

    plan = SplitterPlan
    step_fields = frozenset({"weight"})

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """The value that draws the same step."""
        return [("sticky_by", message.splitter.sticky_by)]

    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        """How it draws."""
        message = scope.node.message.splitter
        sticky_by = builder.condition(scope, f"{scope.node.kind_path}.sticky_by", _STICKY_BY)
        bandit = _bandit(message.bandit) if message.HasField("bandit") else None
        self._check_sequences(builder, scope)
        return {"sticky_by": sticky_by, "salt": message.salt, "bandit": bandit}

    def _check_sequences(self, builder: NodeBuilder, scope: Scope) -> None:
        message, path = scope.node.message.splitter, scope.node.kind_path
        found = stateful_model(scope.names.steps, builder.names)
        if not found or "sequence_id" in message.sticky_by:
            return
        for field in ("sticky_by", "bandit"):
            if f"{path}.{field}" in scope.file.positions:
                builder.report.error(
                    STATE,
                    scope.file,
                    f"{path}.{field}",
                    f"{found} keeps the state of sequences (sequence_batching), and '{field}' sends the requests "
                    "of one sequence to different steps; leave it out: without it a sequence stays with its step",
                    is_name=True,
                )

    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """What a bandit, a salt or a single step leaves without effect, and shares that can only be a mistake."""
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


def _bandit(message: pb.Bandit) -> BanditPlan:
    algorithm = ALGORITHMS[pb.Bandit.Algorithm.Name(message.algorithm)]
    return BanditPlan(algorithm, message.epsilon or _DEFAULT_EPSILON, message.min_pulls)


def _bandit_notes(bandit: BanditPlan) -> list[str]:
    notes = [f"{bandit.algorithm.name}{f', epsilon {bandit.epsilon:g}' * bandit.algorithm.takes_epsilon}"]
    if bandit.min_pulls:
        notes.append(f"first {counted(bandit.min_pulls, 'request')} for each by weight")
    return notes
