"""A switch: alternatives, of which the first whose case or test holds gives the node's outputs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.description import cases_text, condition_text, given, offered, shadow_flows
from weft.language.path_form import PathForm
from weft.language.plan import Condition, Description, End, Flow, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.expression import read_expression
from weft.router.operators.alternatives import AlternativesKind, only_branch
from weft.router.operators.switch.run import SwitchNode, SwitchNodeByRow
from weft.router.steps import Node, NodeParts, OperatorPlan
from weft_protos import graph_pb2 as pb

_ON = Purpose("on", ("string", "int", "bool"))
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class SwitchPlan(OperatorPlan):
    """A switch.

    Attributes:
        on: Compared with the cases of the steps; None where each step has a test.
        per_row: Each row of the batch goes its own way. Every tensor of the node has a batch dimension.
    """

    kind: ClassVar[str] = "switch"
    path_form: ClassVar[PathForm] = PathForm.of("[", "]", only_branch)
    watches: ClassVar[frozenset[str]] = frozenset({"when"})

    on: Condition | None = None
    per_row: bool = False

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The value that cases are compared with."""
        return () if self.on is None else (self.on,)

    @override
    def node(self, parts: NodeParts) -> Node:
        return (SwitchNodeByRow if self.per_row else SwitchNode)(self, parts, self.on)

    def describe(self) -> Description:
        """The test of each branch."""
        flows: list[Flow] = []
        for index, step in enumerate(self.steps):
            flows.append(Flow(None, index, (_test_text(step),), given(step)))
            flows.append(Flow(index, None, tensors=offered(step), gives=True))
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End(
                "each row: first that holds" if self.per_row else "first that holds",
                (f"on {condition_text(self.on)}",) if self.on is not None else (),
            ),
            exit=End("rows in order again" if self.per_row else "its answer"),
            flows=(*flows, *shadow_flows(self)),
        )


class SwitchKind(AlternativesKind):
    """Switches in a file."""

    plan = SwitchPlan
    step_fields = frozenset({"case", "otherwise"})
    chooses_by_when = True

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """The value that cases are compared with."""
        return [("on", message.switch.on)]

    def why_no_default(self, step: pb.Step) -> str:
        """A step that is not chosen has no part in the answer, so only a failure is worth a default."""
        if step.dependency == pb.Step.SOFT:
            return ""
        return "on a HARD step of a switch, whose failure fails the node; make it 'dependency: SOFT'"

    def per_row(self, node: NodeDefinition) -> bool:
        """As the file says."""
        return node.message.switch.per_row

    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        """The value, and the cases that it can never be reported."""
        on = builder.condition(scope, f"{scope.node.kind_path}.on", _ON)
        if on is not None and on.type_name in ("bool", "int"):
            _check_cases(scope, on.type_name, builder.report)
        return {"on": on, "per_row": self.per_row(scope.node)}

    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Steps that are never chosen (G013), requests that choose none (G012), whatever the models answer."""
        switch = node.message.switch
        cases: dict[str, str] = {}
        tests: dict[str, str] = {}
        otherwise = otherwise_path = certain = ""
        for step in node.steps:
            message, path = step.message, step.path
            given = [name for name in ("when", "case", "otherwise") if getattr(message, name)]
            if len(given) != 1:
                have = " and ".join(f"'{name}'" for name in given) or "none"
                text = f"step '{step.name}' must have one of 'when', 'case' and 'otherwise'; it has {have}"
                report.error("G013", file, path, text)
            if certain and not message.otherwise:
                text = f"step '{step.name}' is never chosen: '{certain}' before it always is"
                report.error("G013", file, path, text)
            for i, case in enumerate(message.case):
                if case in cases:
                    text = f"case '{case}' is taken by step '{cases[case]}' already"
                    report.error("G013", file, f"{path}.case[{i}]", text)
                cases.setdefault(case, step.name)
            if message.case and not switch.on:
                text = (
                    "'case' has no effect in a switch without 'on'; give it the value to compare: on: 'text(inputs.X)'"
                )
                report.error("G018", file, f"{path}.case[0]", text, is_name=True)
            if message.otherwise:
                if otherwise:
                    report.error("G013", file, f"{path}.otherwise", f"step '{otherwise}' is 'otherwise' already")
                otherwise, otherwise_path = otherwise or step.name, otherwise_path or f"{path}.otherwise"
            if message.when:
                if message.when in tests:
                    text = f"step '{tests[message.when]}' has the same test, so this one is never chosen"
                    report.error("G013", file, f"{path}.when", text)
                tests.setdefault(message.when, step.name)
                constant = read_expression(message.when).constant
                certain = certain or (step.name if constant else "")
                if constant is False:
                    report.error(
                        "G013", file, f"{path}.when", f"step '{step.name}' is never chosen: 'when' is always false"
                    )
        if switch.on and not cases:
            text = "'on' has no effect: no step has a 'case'"
            report.error("G018", file, f"{node.kind_path}.on", text, is_name=True)
        if not otherwise and not certain and not _decides_all(node):
            text = (
                f"switch '{node.name}' has no 'otherwise': a request that matches no step fails with INVALID_ARGUMENT; "
                "to answer it, give one step 'otherwise: true'"
            )
            report.warning("G012", file, node.kind_path, text)
        elif otherwise and certain:
            text = f"step '{otherwise}' is never chosen: '{certain}' always is"
            report.error("G013", file, otherwise_path, text, is_name=True)


def _decides_all(node: NodeDefinition) -> bool:
    return {case for step in node.steps for case in step.message.case} == {"true", "false"}


def _check_cases(scope: Scope, type_name: str, report: GraphReport) -> None:
    for step in scope.node.steps:
        for i, case in enumerate(step.message.case):
            is_integer = _INTEGER.fullmatch(case) is not None
            if case not in ("true", "false") if type_name == "bool" else not is_integer:
                text = f"case '{case}' is never chosen: 'on' is {type_name}"
                report.error("G013", scope.file, f"{step.path}.case[{i}]", text)
        if step.message.otherwise and type_name == "bool" and _decides_all(scope.node):
            text = f"step '{step.name}' is never chosen: 'on' is bool, and both its values have a 'case'"
            report.error("G013", scope.file, f"{step.path}.otherwise", text, is_name=True)


def _test_text(step: StepPlan) -> str:
    if step.is_otherwise:
        return "otherwise"
    if step.when is not None:
        return f"when {condition_text(step.when)}"
    return f"case {cases_text(step.cases)}"
