"""Checks fields: not allowed in graphs (G024, G026), without effect (G018), out of range (G025)."""

from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.base.text.pbtxt import is_map
from weft.language.syntax.file import (
    GivenPolicies,
    GraphFile,
    GraphReport,
    KindSyntax,
    NodeDefinition,
    StepDefinition,
    has_field,
)
from weft.language.syntax.parse import given_fields
from weft.language.types.expression import read_expression
from weft_protos import graph_pb2 as pb

_TENSOR = "inside a graph tensors are passed on as they are; only the graph's own inputs and outputs may have it"
_STATIC = "tensors are plain arrays here, never a model's shape values or a vendor's layout"
#: Message: its field, and what to do instead.
_UNSUPPORTED = {
    "Step": {"model_namespace": "leave it out, model names are unique in a router"},
    "ModelInput": {
        "reshape": _TENSOR,
        "is_shape_tensor": _STATIC,
        "is_non_linear_format_io": _STATIC,
    },
    "Output": {"reshape": _TENSOR, "is_shape_tensor": _STATIC, "is_non_linear_format_io": _STATIC},
}
#: Triton Inference Server's own words for fields that only a model has.
_MODEL_ONLY = {
    "instance_group": "instance group should not be specified",
    "optimization": "optimization should not be specified",
    "model_warmup": "model_warmup can not be specified",
    "backend": "backend should not be specified",
    "default_model_filename": "default_model_filename should not be specified",
}


def check_features(file: GraphFile, report: GraphReport) -> None:
    """Report fields without effect (G018), values out of range (G025), and fields not for graphs (G024, G026)."""
    _walk(file, file.message, "", report)
    for name, text in _MODEL_ONLY.items():
        if any(field.name == name for field, _ in file.message.ListFields()):
            report.error("G026", file, name, f"{text} for {file.title}; it belongs to a model", is_name=True)
    check_fields(file, report)
    check_limits(file, report)


def _walk(file: GraphFile, message: Message, prefix: str, report: GraphReport) -> None:
    unsupported = _UNSUPPORTED.get(message.DESCRIPTOR.name, {})
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.name == "reshape" and prefix.startswith(("input", "output")):
            continue
        if field.name == "allow_ragged_batch":
            text = "'allow_ragged_batch' changes nothing here: requests are batched by the servers of the models"
            report.warning("G018", file, path, text)
        elif field.name in unsupported:
            text = f"'{field.name}' is not supported by this version of Weft; {unsupported[field.name]}"
            report.error("G024", file, path, text, is_name=True)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not is_map(field):
            items = (
                [(f"{path}[{i}].", item) for i, item in enumerate(value)]
                if field.is_repeated
                else [(f"{path}.", value)]
            )
            for inner, item in items:
                _walk(file, item, inner, report)


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
    """Warn of given fields (name, is given) that control a choice among steps, if there is only one step."""
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
    message = step.message
    is_idle = bool(message.node and message.model_version)
    report.refuse(file, step.path, [("model_version", is_idle)], "on a node of this file")
    for entry in getattr(file.message, "import"):  # a Python keyword
        is_imported = message.graph == (getattr(entry, "as") or entry.graph) != ""
        why = f"here: the import of '{entry.graph}' gives version {entry.version}"
        is_idle = is_imported and entry.version > 0 and message.model_version != 0
        report.refuse(file, step.path, [("model_version", is_idle)], why)


def check_limits(file: GraphFile, report: GraphReport) -> None:
    """Report values of policies and shadows that are certainly mistakes."""
    graph = file.message.policy
    _check_policy(file, graph, "policy", [], report)
    for node in file.all_nodes:
        own = node.message.policy
        _check_policy(file, own, f"{node.path}.policy", [graph], report)
        for step in node.every_step():
            _check_policy(file, step.message.policy, f"{step.path}.policy", [own, graph], report)
            if step.message.HasField("shadow"):
                percent = step.message.shadow.percent
                if not 0 < percent <= 100:
                    text = f"the shadow has 'percent: {percent:g}'; give the share of requests it gets, above 0 to 100"
                    report.error("G025", file, f"{step.path}.shadow.percent", text)
        for custom in node.customs.values():
            _check_policy(file, custom.message.policy, f"{custom.path}.policy", [own, graph], report)


def _check_policy(file: GraphFile, policy: pb.Policy, path: str, around: list[pb.Policy], report: GraphReport) -> None:
    """Check one policy; ``around`` are those of node and graph, which it overrides."""
    for kind in file.policies.values():
        if has_field(policy, kind.field):
            kind.check(file, policy, f"{path}.{kind.field}", around, report)


def min_remaining_ms(file: GraphFile, given: GivenPolicies, path: str, report: GraphReport) -> int:
    """The ``min_remaining_ms`` that applies to one step; 0: none.

    Args:
        report: Receives an error if the step never runs, because it wants more time than is available (G021).
    """
    wanted_ms = next((policy.min_remaining_ms for policy in given.inherited if policy.min_remaining_ms), 0)
    limit_ms = min((policy.timeout_ms for policy in given.around if policy.timeout_ms), default=0)
    if 0 < limit_ms <= wanted_ms:
        text = (
            f"the step never runs: it wants 'min_remaining_ms: {wanted_ms}', but all the time there is, the "
            f"'timeout_ms' around it, is {limit_ms}; make the first less than the second"
        )
        report.error("G021", file, f"{path}.policy.min_remaining_ms", text)
    return wanted_ms


_DECOUPLED = "model_transaction_policy.decoupled"


def check_responses(file: GraphFile, report: GraphReport, *, streams: bool, is_known: bool) -> None:
    """Report fields that need a decoupled graph (G018), that such a graph cannot have (G019), and a wrong claim (G040).

    Args:
        streams: Whether it may give several responses to a request.
        is_known: Whether every step's model is known.
    """
    message, is_checked = file.message, file.dialect.checks_decoupled
    if not streams:
        if is_known and message.model_transaction_policy.decoupled and is_checked:
            text = "'decoupled' has no effect: no step streams, so each request gets one response"
            report.error("G018", file, _DECOUPLED, text, is_name=True)
        return
    if _DECOUPLED in file.positions and not message.model_transaction_policy.decoupled and is_checked:
        text = (
            "'decoupled: false' says that each request gets one response, but a step streams; write true, or leave it "
            "out"
        )
        report.error("G040", file, _DECOUPLED, text, is_name=True)
    for path, is_given in (
        ("policy.cache", message.policy.HasField("cache")),
        ("response_cache.enable", message.response_cache.enable),
    ):
        if is_given:
            name = path.removesuffix(".enable").rpartition(".")[2]
            text = f"'{name}' is not for a decoupled graph: the graph gives several responses to a request"
            report.error("G019", file, path, text, is_name=True)
