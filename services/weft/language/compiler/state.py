"""Checks of stateful models: reports what would lose, repeat or mix up requests of a sequence (G031)."""

from collections.abc import Iterable

from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import StepNames, describe, target_path
from weft.language.compiler.resolve import ModelTarget, NodeTarget, Target
from weft.language.compiler.scope import Scope
from weft.language.syntax.file import GivenPolicies, GraphReport, has_field
from weft_protos import graph_pb2 as pb

CODE = "G031"
_CURES = {
    "cache": "answers a request without a call, so that the state misses it",
    "retry": "may send a request twice, which the state then counts twice",
    "hedge": "may send a request twice, which the state then counts twice",
}


def targets_of(step: StepNames) -> list[Target]:
    """Targets of a step and its fallbacks."""
    return [one.target for one in step.chain()]


def stateful_model(steps: Iterable[StepNames], names: NameTable) -> str:
    """The first model with ``sequence_batching`` that the steps call, directly or nested; "" if none."""
    return _stateful(steps, names, set())


def check_rows(scope: Scope, names: NameTable, report: GraphReport, why: str, code: str = CODE) -> None:
    """Report steps with stateful models in a node that changes the rows of calls; ``why`` says how."""
    for own in scope.names.steps:
        if found := stateful_model([own], names):
            cure = f"call it outside of '{scope.node.name}', or use a model without 'sequence_batching'"
            text = f"{found} keeps the state of sequences (sequence_batching), and {why}; {cure}"
            report.error(code, scope.file, target_path(own.definition), text)


def check_step(scope: Scope, own: StepNames, names: NameTable, given: GivenPolicies, report: GraphReport) -> None:
    """Report features that a step with a stateful model cannot have, and inherited policies that do not apply to it."""
    if not (found := stateful_model([own], names)):
        return
    step = own.definition
    keeps = f"{found} keeps the state of sequences (sequence_batching)"
    is_call = isinstance(own.target, ModelTarget) and own.target.signature.is_stateful
    for field, why in _CURES.items():
        if not (is_call or field == "cache"):
            continue
        if has_field(given.own, field):
            path, text = f"{step.path}.policy.{field}", f"{keeps}, and a {field} {why}; leave '{field}' out"
            report.error(CODE, scope.file, path, text, is_name=True)
        elif field != "cache" and given.is_call and any(has_field(policy, field) for policy in given.around):
            text = f"the '{field}' around step '{step.name}' does not hold for its requests of a sequence: {keeps}"
            report.info(CODE, scope.file, step.path, text)
    if is_call and step.message.dependency == pb.Step.SOFT:
        text = f"{keeps}, and a SOFT step goes on without an answer, so that client and state disagree; make it HARD"
        report.error(CODE, scope.file, f"{step.path}.dependency", text)


def _stateful(steps: Iterable[StepNames], names: NameTable, seen: set[tuple[str, str]]) -> str:
    for target in (target for step in steps for target in targets_of(step)):
        if isinstance(target, ModelTarget) and target.signature.is_stateful:
            return describe(target)
        if isinstance(target, NodeTarget) and target.key not in seen:
            seen.add(target.key)
            if found := _stateful(names.of(target.file, target.node).every_call(), names, seen):
                return found
    return ""
