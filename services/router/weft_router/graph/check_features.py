"""What a file asks for and this version does not do: an error at its place, so that nothing is silently ignored."""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft_common.pbtxt import is_map
from weft_protos import graph_pb2 as pb
from weft_router.graph.parse import GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.plan import NodeKind
from weft_router.graph.report import Report

_UNSUPPORTED = {
    "Sequence": {"ordered", "loop"},
    "Switch": {"per_row"},
    "Splitter": {"bandit"},
    "Ensemble": {"quorum", "straggler_ms"},
    "Combine": {"custom"},
    "Node": {"cascade"},
    "Ensembling": {"max_inflight_requests"},
    "Step": {"default", "fallback", "shadow", "model_namespace"},
    "Policy": {"retry", "hedge", "cache", "min_remaining_ms"},
    "ModelInput": {"reshape", "is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io"},
    "ModelOutput": {"reshape", "is_shape_tensor", "is_non_linear_format_io"},
}
#: Triton Inference Server's own words for fields that only a model has.
_MODEL_ONLY = {
    "instance_group": "instance group should not be specified",
    "optimization": "optimization should not be specified",
    "model_warmup": "model_warmup can not be specified",
    "backend": "backend should not be specified",
    "default_model_filename": "default_model_filename should not be specified",
}
_STEP_FIELDS = {
    "case": {NodeKind.SWITCH},
    "otherwise": {NodeKind.SWITCH},
    "weight": {NodeKind.SPLITTER, NodeKind.ENSEMBLE},
    "accept": set[NodeKind](),
}
_TRITON_STEP = {"model_name", "model_version", "input_map", "output_map", "model_namespace"}
_METHODS = {"KEYED", "VOTE", "AVERAGE", "CONCAT", "FIRST"}
_WEIGHTED = {"VOTE", "AVERAGE"}


def check_features(file: GraphFile, report: Report) -> None:
    """Report each field without effect (G018), not supported by this version (G024) or not for ensembles (G026)."""
    _walk(file, file.message, "", report)
    message = file.message
    what = f"for {'ensemble' if file.is_ensemble else 'graph'} '{file.name}'"
    for name, text in _MODEL_ONLY.items():
        if _has(message, name):
            report.error("G026", file, name, f"{text} {what}; it belongs to a model", is_name=True)
    if message.model_transaction_policy.decoupled:
        _refuse(file, "model_transaction_policy.decoupled", "decoupled", report)
    if message.response_cache.enable:
        _refuse(file, "response_cache.enable", "response_cache", report)
    if message.HasField("version_policy") and not file.is_ensemble:
        hint = "each version of a graph has a file of its own"
        report.error(
            "G018", file, "version_policy", f"'version_policy' has no effect in a graph file; {hint}", is_name=True
        )
    for i, output in enumerate(message.output):
        if output.label_filename:
            path = f"output[{i}].label_filename"
            report.warning("G024", file, path, "'label_filename' is not used: classification is not supported")
    for node in file.all_nodes:
        _check_node(file, node, report)


def _refuse(file: GraphFile, path: str, what: str, report: Report, *, where: str = "") -> None:
    report.error("G024", file, path, f"'{what}' is not supported by this version of Weft{where}", is_name=True)


def _has(message: Message, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())


def _walk(file: GraphFile, message: Message, prefix: str, report: Report) -> None:
    """Report fields of ``_UNSUPPORTED`` wherever they stand; what is below one is not looked at."""
    unsupported = _UNSUPPORTED.get(message.DESCRIPTOR.name, set())
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.name in unsupported:
            _refuse(file, path, field.name, report)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not is_map(field):
            items = (
                [(f"{path}[{i}].", item) for i, item in enumerate(value)]
                if field.is_repeated
                else [(f"{path}.", value)]
            )
            for inner, item in items:
                _walk(file, item, inner, report)


def _check_node(file: GraphFile, node: NodeDefinition, report: Report) -> None:
    if node.message.policy.max_inflight:
        _refuse(file, f"{node.path}.policy.max_inflight", "max_inflight", report, where=", except for the whole graph")
    if node.kind is None:
        return
    for step in node.steps:
        _check_step(file, node.kind, step, report)
    if node.kind is NodeKind.SPLITTER and node.message.splitter.salt and not node.message.splitter.sticky_by:
        report.error("G018", file, f"{node.kind_path}.salt", "'salt' has no effect without 'sticky_by'", is_name=True)
    if node.kind is NodeKind.ENSEMBLE:
        _check_combines(file, node, report)


def _check_step(file: GraphFile, kind: NodeKind, step: StepDefinition, report: Report) -> None:
    message, path = step.message, step.path
    given = {field.name for field, _ in message.ListFields()}
    if file.is_ensemble:
        for name in sorted(given - _TRITON_STEP - _UNSUPPORTED["Step"]):
            hint = "'platform: \"graph\"' allows it"
            report.error("G026", file, f"{path}.{name}", f"a step of an ensemble has no '{name}'; {hint}", is_name=True)
        return
    for name, kinds in _STEP_FIELDS.items():
        if name in given and kind not in kinds:
            useful = " or ".join(sorted(one.value for one in kinds)) or "cascade"
            text = f"'{name}' has no effect in this {kind.value}; it belongs to: {useful}"
            report.error("G018", file, f"{path}.{name}", text, is_name=True)
    if "when" in given and kind is not NodeKind.SWITCH:
        _refuse(file, f"{path}.when", "when", report, where=", except in a switch")
    if message.dependency == pb.Step.SOFT:
        _refuse(file, f"{path}.dependency", "dependency: SOFT", report)
    if message.policy.max_inflight:
        _refuse(file, f"{path}.policy.max_inflight", "max_inflight", report, where=", except for the whole graph")
    if message.node and message.model_version:
        text = "'model_version' has no effect on a node of this file"
        report.error("G018", file, f"{path}.model_version", text, is_name=True)


def _check_combines(file: GraphFile, node: NodeDefinition, report: Report) -> None:
    combines = node.message.ensemble.combine
    for i, combine in enumerate(combines):
        path = f"{node.kind_path}.combine[{i}]"
        method = pb.Combine.Method.Name(combine.method)
        if method not in _METHODS:
            _refuse(file, f"{path}.method", f"method: {method}", report)
            continue
        idle = {
            "weighted": combine.weighted and method not in _WEIGHTED,
            "axis": bool(combine.axis) and method != "CONCAT",
            "output": bool(combine.output) and method == "KEYED",
        }
        for name in (name for name, is_idle in idle.items() if is_idle):
            hint = "; give a 'method'" if not _has(combine, "method") else ""
            report.error("G018", file, f"{path}.{name}", f"'{name}' has no effect with {method}{hint}", is_name=True)
    if not any(combine.weighted for combine in combines):
        for step in node.steps:
            if step.message.weight:
                text = "'weight' has no effect: no 'combine' of the ensemble is 'weighted'"
                report.error("G018", file, f"{step.path}.weight", text, is_name=True)
