"""Fields that would have no effect where they stand (G018): each is an error that says where it would have one."""

from collections.abc import Iterable

from weft.language.syntax.file import GraphFile, GraphReport, KindSyntax, NodeDefinition, StepDefinition
from weft.language.syntax.parse import given_fields
from weft.language.types.expression import read_expression
from weft_protos import graph_pb2 as pb

_STEP_FIELDS = ("case", "otherwise", "weight", "accept", "after")
#: Of a fallback, a shadow and a custom step: fields that belong elsewhere.
OF_THE_STEP = ("when", "case", "otherwise", "accept", "weight", "dependency", "default", "shadow", "after")
_OF_AN_ANSWER = ("output_map", "case", "otherwise", "accept", "weight", "dependency", "default", "fallback")


def check_fields(file: GraphFile, report: GraphReport) -> None:
    """Report every field without effect."""
    message = file.message
    why = "in a graph file; each version has a file of its own"
    report.refuse(file, "", given_fields(message, file.dialect.idle_fields), why)
    if message.response_cache.enable and message.policy.HasField("cache"):
        text = "'response_cache' has no effect beside 'policy { cache { } }', which says more; leave it out"
        report.error("G018", file, "response_cache", text, is_name=True)
    for node in file.all_nodes:
        _check_node(file, node, report)


def check_choices(
    file: GraphFile, node: NodeDefinition, choices: Iterable[tuple[str, bool]], report: GraphReport
) -> None:
    """Warn of fields (name, is given) of the kind that say how to take one of several steps, where there is one."""
    for name in (name for name, is_given in choices if is_given and len(node.steps) == 1):
        text = f"'{name}' has no effect where there is only one step to take"
        report.warning("G018", file, f"{node.kind_path}.{name}", text)


def _check_node(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    for policy in (one for one in file.policies.values() if not one.is_inherited):
        why = f"on a node; give it to {policy.where_instead(is_root=node.name == file.root)}"
        report.refuse(file, f"{node.path}.policy", given_fields(node.message.policy, (policy.field,)), why)
    steps = list(node.every_step())
    if steps and not any(step.message.model_name for step in steps):
        why = "on a node none of whose steps calls a model; give it to the steps"
        inherited = [policy.field for policy in file.policies.values() if policy.is_inherited]
        fields = given_fields(node.message.policy, (*inherited, "min_remaining_ms"))
        report.refuse(file, f"{node.path}.policy", fields, why)
    if node.kind is None:
        return
    node.kind.check_fields(file, node, report)
    for step in (*node.steps, *node.shadows):
        _check_step(file, node.kind, step, report)


def _check_step(file: GraphFile, kind: KindSyntax, step: StepDefinition, report: GraphReport) -> None:
    message = step.message
    if message.HasField("shadow"):
        report.refuse(file, step.path, given_fields(message, _OF_AN_ANSWER), "on a shadow, whose answer is dropped")
        why = "on a shadow, which is called once and never waited for"
        hint = f"{why}; to limit it, use 'shadow {{ max_inflight: ... }}' and 'timeout_ms'"
        limits = given_fields(message.policy, (*file.policies, "min_remaining_ms", "max_inflight"))
        report.refuse(file, f"{step.path}.policy", limits, hint)
    of_kinds = [name for name in _STEP_FIELDS if not (message.HasField("shadow") and name in _OF_AN_ANSWER)]
    for name, is_given in given_fields(message, of_kinds):
        if is_given and name not in kind.step_fields:
            useful = " or ".join(sorted(one.name for one in file.kinds.values() if name in one.step_fields))
            report.refuse(file, step.path, [(name, True)], f"in this {kind.name}; it belongs to: {useful}")
    if not kind.chooses_by_when and message.when and read_expression(message.when).constant:
        report.warning("G018", file, f"{step.path}.when", "'when' has no effect: it is always true; leave it out")
    _check_target(file, step, report)
    before, fallback = message, step.fallback
    while fallback is not None:
        why = "on a fallback, which stands in for its step and runs when that has failed; give it to the step"
        report.refuse(file, fallback.path, given_fields(fallback.message, OF_THE_STEP), why)
        _check_target(file, fallback, report)
        other = fallback.message
        if other.model_name and _call_of(other) == _call_of(before):
            text = "the fallback repeats the call that has just failed; to call again, give the step a 'retry'"
            report.warning("G018", file, f"{fallback.path}.model_name", text)
        before, fallback = other, fallback.fallback


def _call_of(message: pb.Step) -> tuple[str, int, dict[str, str]]:
    return message.model_name, max(message.model_version, 0), dict(message.input_map)


def _check_target(file: GraphFile, step: StepDefinition, report: GraphReport) -> None:
    """``model_version`` where the target has none, or another one."""
    message = step.message
    is_idle = bool(message.node and message.model_version)
    report.refuse(file, step.path, [("model_version", is_idle)], "on a node of this file")
    for entry in getattr(file.message, "import"):  # a Python keyword
        is_imported = message.graph == (getattr(entry, "as") or entry.graph) != ""
        why = f"here: the import of '{entry.graph}' gives version {entry.version}"
        is_idle = is_imported and entry.version > 0 and message.model_version != 0
        report.refuse(file, step.path, [("model_version", is_idle)], why)
