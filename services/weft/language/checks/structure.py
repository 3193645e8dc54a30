"""Checks of a file on its own: names, targets, declarations, weights, unreachable nodes."""

import math
from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.base.tensors import reshape_fault
from weft.base.text.pbtxt import is_map, suggestion
from weft.language.dialects import GRAPH, TRITON
from weft.language.pruning import reached
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition
from weft.language.syntax.parse import NAME, given_fields, targets_of
from weft.language.types.expression import read_expression
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import DataType, ModelInput

_PLATFORMS = (GRAPH.platform, TRITON.platform)


def check_structure(file: GraphFile, report: GraphReport) -> None:
    """Report errors that can be seen without other files and models."""
    _check_graph(file, report)
    _check_tensors(file, file.message.input, "input", report)
    _check_tensors(file, file.message.output, "output", report)
    for path in file.positions.duplicate_keys:
        name, _, key = path.removesuffix("]").rpartition("[")
        text = f"'{name.rpartition('.')[2]}' has the key '{key}' already, and only one can count; leave one out"
        report.error("G005", file, f"{path}.key", text)
    for node in file.all_nodes:
        _check_node(file, node, report)
    _check_reachable(file, report)


def _check_graph(file: GraphFile, report: GraphReport) -> None:
    message, source = file.message, file.source
    if not file.name:
        report.error("G025", file, "name", "the graph has no 'name'")
    if source.name and message.name and source.name != message.name:
        text = f"the file says '{message.name}', but its folder is '{source.name}'; the two must be equal"
        report.error("G025", file, "name", text)
    if message.platform and message.platform not in _PLATFORMS:
        text = f"unknown platform '{message.platform}'{suggestion(message.platform, _PLATFORMS)}"
        report.error("G025", file, "platform", text)
    if message.max_batch_size < 0:
        report.error(
            "G009", file, "max_batch_size", f"max_batch_size is {message.max_batch_size}; it must be 0 or more"
        )
    for path in file.foreign:
        owner, _, name = path.rpartition(".")
        text = f"{'a step of an ensemble' if owner else 'an ensemble'} has no '{name}'; 'platform: \"graph\"' allows it"
        report.error("G026", file, path, text, is_name=True)
    for name, is_given in given_fields(message, file.dialect.required_fields):
        if not is_given:
            report.error("G026", file, "platform", f"must specify '{name}' for {file.title}")
    if not file.all_nodes:
        if "node" not in file.foreign:
            report.error("G025", file, "name", "the graph has no 'node'")
    elif file.root not in file.nodes:
        text = f"there is no node '{file.root}', which is the root{suggestion(file.root, file.nodes)}"
        report.error("G002", file, "root" if message.root else f"{file.all_nodes[0].path}.name", text)
    else:
        root = file.nodes[file.root]
        for name in ("input", "output"):
            if getattr(root.message, name):
                text = f"the root node's '{name}' is that of the graph; declare it there"
                report.error("G018", file, f"{root.path}.{name}", text, is_name=True)
    names = [getattr(entry, "as") or entry.graph for entry in getattr(message, "import")]
    for i, name in enumerate(names):
        if not name:
            report.error("G025", file, f"import[{i}]", "the import has no 'graph'")
        elif name in names[:i]:
            report.error("G025", file, f"import[{i}]", f"import '{name}' is given already; use 'as'")
        elif not any(step.message.graph == name for node in file.all_nodes for step in node.steps):
            report.warning("G018", file, f"import[{i}]", f"no step uses the import '{name}'")


def _check_tensors(file: GraphFile, tensors: Iterable[ModelInput | pb.Output], path: str, report: GraphReport) -> None:
    seen: dict[str, ModelInput | pb.Output] = {}
    for i, tensor in enumerate(tensors):
        where = f"{path}[{i}]"
        if not tensor.name:
            report.error("G025", file, where, f"the {path.rpartition('.')[2]} has no 'name'")
            continue
        if seen.setdefault(tensor.name, tensor) is not tensor:
            is_repeated = file.dialect.may_repeat_declarations and tensor == seen[tensor.name]
            add = report.warning if is_repeated else report.error
            add("G005", file, f"{where}.name", f"'{tensor.name}' is declared already; leave one out")
        if tensor.data_type == DataType.TYPE_INVALID:
            report.error("G007", file, where, f"'{tensor.name}' has no 'data_type'")
        if not tensor.dims:
            report.error("G008", file, where, f"'{tensor.name}' has no 'dims'")
        elif tensor.HasField("reshape"):
            fault = reshape_fault(tensor.dims, tensor.reshape.shape, has_batch=file.is_batched)
            if fault is not None:
                report.error("G008", file, f"{where}.{fault[0]}", f"'{tensor.name}' {fault[1]}")
        for k, dim in enumerate(tensor.dims):
            if dim < 1 and dim != -1:
                text = f"dimension must be integer >= 1, or -1 to indicate a variable-size dimension; got {dim}"
                report.error("G008", file, f"{where}.dims[{k}]", text)


def _check_node(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    if not NAME.fullmatch(node.name):
        _refuse_name(file, node.path, "node", node.name, report)
    elif file.nodes[node.name] is not node:
        report.error("G025", file, f"{node.path}.name", f"node '{node.name}' is defined twice")
    _check_tensors(file, node.message.input, f"{node.path}.input", report)
    _check_tensors(file, node.message.output, f"{node.path}.output", report)
    if node.kind is None:
        *names, last = file.kinds
        text = f"node '{node.name}' has no kind; give it a {', '.join(names)} or {last}"
        report.error("G025", file, node.path, text)
        return
    if all(step.is_shadow for step in node.steps):
        hint = "; a shadow never answers" if node.steps or node.shadows else ""
        report.error("G025", file, node.kind_path, f"{file.dialect.empty_node(file.name, node.name)}{hint}")
    seen: set[str] = set()
    for step in (*node.steps, *node.shadows):
        if step.name in seen:
            report.error("G025", file, f"{step.path}.name", f"step '{step.name}' is defined twice in '{node.name}'")
        seen.add(step.name)
        _check_defaults(file, step, report)
    for step in node.every_step():
        _check_step(file, node, step, report)
    if "weight" in node.kind.step_fields:
        _check_weights(file, node, report)
    for step in node.shadows if node.kind.chooses_by_when else (*node.steps, *node.shadows):
        if step.message.when and read_expression(step.message.when).constant is False:
            report.error("G013", file, f"{step.path}.when", f"step '{step.name}' never runs: 'when' is always false")
    node.kind.check(file, node, report)


def _refuse_name(file: GraphFile, path: str, what: str, name: str, report: GraphReport) -> None:
    if name:
        text = f"{what} name '{name}' must be letters, digits, '_', '-', '.' and ':'; it stands in paths and metadata"
        report.error("G025", file, f"{path}.name", text)
    else:
        report.error("G025", file, path, f"the {what} has no 'name'")


def _check_step(file: GraphFile, node: NodeDefinition, step: StepDefinition, report: GraphReport) -> None:
    message = step.message
    if message.name and not NAME.fullmatch(message.name):
        _refuse_name(file, step.path, "step", message.name, report)
    targets, required = targets_of(message), file.dialect.required_step_fields
    for name in required:
        if not getattr(message, name):
            text = f"must specify '{name}' in step {node.steps.index(step)} of {file.title}"
            report.error("G026", file, step.path, text)
    if not required and len(targets) != 1:
        given = " and ".join(targets) or "none"
        text = f"step '{step.name}' must have one of model_name, node and graph; it has {given}"
        report.error("G025", file, step.path, text)
    for name in ("input_map", "output_map"):
        for key, value in sorted(getattr(message, name).items()):
            if not key or not value:
                what = "'key'" if not key else "'value'"
                text = (
                    f"this '{name}' has no {what}; key is the name that the target uses, value the tensor's name here"
                )
                report.error("G006", file, f"{step.path}.{name}[{key}]", text)
    if message.model_version < -1:
        text = f"model_version is {message.model_version}; give a version, or -1 for the latest"
        report.error("G025", file, f"{step.path}.model_version", text)


def _check_defaults(file: GraphFile, step: StepDefinition, report: GraphReport) -> None:
    seen: set[str] = set()
    for i, default in enumerate(step.message.default):
        path = f"{step.path}.default[{i}]"
        if not default.output:
            text = f"the default of step '{step.name}' has no 'output'; name the output whose value it is"
            report.error("G025", file, path, text)
        elif default.output in seen:
            text = f"output '{default.output}' has a default already; leave one out"
            report.error("G005", file, f"{path}.output", text)
        seen.add(default.output)


def _check_weights(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    given = [step for step in node.steps if f"{step.path}.weight" in file.positions]
    least = "at least" if node.message.HasField("splitter") else "above"
    for step in given:
        weight = step.message.weight
        if not 0 <= weight < math.inf or (weight == 0 and least == "above"):
            text = f"weight of step '{step.name}' is {weight:g}; it must be {least} 0 and finite"
            report.error("G014", file, f"{step.path}.weight", text)
    weights = [step.message.weight if step.message.HasField("weight") else 1.0 for step in node.steps]
    if given and not any(weights):
        report.error("G014", file, f"{given[0].path}.weight", "every weight is 0; one of them must be above it")
    total = sum(weights)
    if math.isinf(total) and math.inf not in weights:
        report.error("G014", file, f"{given[0].path}.weight", "the sum of the weights is not finite; make them smaller")


def _check_reachable(file: GraphFile, report: GraphReport) -> None:
    """Report nodes unreachable from the root, the first of each such path, and steps with missing nodes."""
    known = _reached(file, file.root)
    apart = [node for node in file.all_nodes if node.name and node.name not in known and file.root in file.nodes]
    reach = {node.name: _reached(file, node.name) for node in apart}
    for node in apart:
        leading = [name for name, names in reach.items() if node.name in names]
        if node.name not in known and reach[node.name].issuperset(leading):
            known |= reach[node.name]
            text = (
                f"node '{node.name}' cannot be reached from '{file.root}': name it in a step, node: "
                f'"{node.name}", or leave it out'
            )
            report.error("G004", file, f"{node.path}.name", text)
    for node in file.all_nodes:
        for step in node.every_step():
            if step.message.node and step.message.node not in file.nodes:
                text = f"unknown node '{step.message.node}'{suggestion(step.message.node, file.nodes)}"
                report.error("G002", file, f"{step.path}.node", text)


def _reached(file: GraphFile, name: str) -> set[str]:
    return reached({name} & file.nodes.keys(), lambda name: _nodes_of(file.nodes[name].message) & file.nodes.keys())


def _nodes_of(message: Message) -> set[str]:
    """Nodes named by the steps in any field of the message."""
    found = {getattr(message, "node", "")} if message.DESCRIPTOR.name == "Step" else set()
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not is_map(field):
            found = found.union(*map(_nodes_of, value if field.is_repeated else [value]))
    return found
