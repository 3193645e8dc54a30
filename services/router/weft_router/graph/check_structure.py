"""What is wrong with a file on its own: names, targets, branches, weights, unreachable nodes."""

import math
from collections.abc import Iterable

from weft_common.pbtxt import suggestion
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import DataType, ModelInput, ModelOutput
from weft_router.graph.expression import read_expression
from weft_router.graph.parse import NAME, GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.plan import NodeKind
from weft_router.graph.report import Report

_PLATFORMS = ("graph", "ensemble")


def check_structure(file: GraphFile, report: Report) -> None:
    """Report what needs no other file and no model to be seen."""
    _check_graph(file, report)
    _check_tensors(file, file.message.input, "input", report)
    _check_tensors(file, file.message.output, "output", report)
    for path in file.positions.duplicate_keys:
        report.error("G005", file, f"{path}.key", "the map has this key already; protobuf would keep the last")
    for node in file.all_nodes:
        _check_node(file, node, report)
    _check_reachable(file, report)


def _check_graph(file: GraphFile, report: Report) -> None:
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
    has_scheduling = message.HasField("ensemble_scheduling")
    if message.platform == "ensemble" and not has_scheduling:
        report.error("G026", file, "platform", f"must specify 'ensemble_scheduling' for ensemble '{file.name}'")
    if file.is_ensemble:
        for name in ("node", "root", "policy", "import"):
            if name in file.positions:
                text = f"an ensemble has no '{name}'; 'platform: \"graph\"' allows it"
                report.error("G026", file, name, text, is_name=True)
    if not file.all_nodes:
        report.error("G025", file, "name", "the graph has no 'node'")
    elif file.root not in file.nodes:
        text = f"there is no node '{file.root}', which is the root{suggestion(file.root, file.nodes)}"
        report.error("G002", file, "root", text)
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
            report.error("G025", file, f"import[{i}]", f"import '{name}' is given twice; use 'as'")
        if not any(step.message.graph == name for node in file.all_nodes for step in node.steps):
            report.warning("G018", file, f"import[{i}]", f"no step uses the import '{name}'")


def _check_tensors(file: GraphFile, tensors: Iterable[ModelInput | ModelOutput], path: str, report: Report) -> None:
    seen: set[str] = set()
    for i, tensor in enumerate(tensors):
        where = f"{path}[{i}]"
        if not tensor.name:
            report.error("G025", file, where, f"the {path.rpartition('.')[2]} has no 'name'")
            continue
        if tensor.name in seen:
            report.error("G005", file, f"{where}.name", f"'{tensor.name}' is declared twice")
        seen.add(tensor.name)
        if tensor.data_type == DataType.TYPE_INVALID:
            report.error("G007", file, where, f"'{tensor.name}' has no 'data_type'")
        if not tensor.dims:
            report.error("G008", file, where, f"'{tensor.name}' has no 'dims'")
        for k, dim in enumerate(tensor.dims):
            if dim < 1 and dim != -1:
                text = f"dimension must be integer >= 1, or -1 to indicate a variable-size dimension; got {dim}"
                report.error("G008", file, f"{where}.dims[{k}]", text)


def _check_node(file: GraphFile, node: NodeDefinition, report: Report) -> None:
    if not NAME.fullmatch(node.name):
        _refuse_name(file, node.path, "node", node.name, report)
    elif file.nodes[node.name] is not node:
        report.error("G025", file, f"{node.path}.name", f"node '{node.name}' is defined twice")
    _check_tensors(file, node.message.input, f"{node.path}.input", report)
    _check_tensors(file, node.message.output, f"{node.path}.output", report)
    if node.message.WhichOneof("kind") is None:
        text = f"node '{node.name}' has no kind; give it a sequence, switch, splitter or ensemble"
        report.error("G025", file, node.path, text)
    if node.kind is None:
        return
    if not node.steps:
        what = f"for ensemble '{file.name}'" if file.is_ensemble else f"in node '{node.name}'"
        report.error("G025", file, node.kind_path, f"must specify 'step' {what}")
    names: set[str] = set()
    for step in node.steps:
        if step.name in names:
            report.error("G025", file, f"{step.path}.name", f"step '{step.name}' is defined twice in '{node.name}'")
        names.add(step.name)
        _check_step(file, node, step, report)
    if node.kind is NodeKind.SWITCH:
        _check_switch(file, node, report)
    _check_combines(file, node, report)


def _refuse_name(file: GraphFile, path: str, what: str, name: str, report: Report) -> None:
    if name:
        text = f"{what} name '{name}' must be letters, digits, '_', '-', '.' and ':'; it stands in paths and metadata"
        report.error("G025", file, f"{path}.name", text)
    else:
        report.error("G025", file, path, f"the {what} has no 'name'")


def _check_step(file: GraphFile, node: NodeDefinition, step: StepDefinition, report: Report) -> None:
    message, index = step.message, step.path[step.path.rindex("[") + 1 : -1]
    if message.name and not NAME.fullmatch(message.name):
        _refuse_name(file, step.path, "step", message.name, report)
    targets = [name for name in ("model_name", "node", "graph") if getattr(message, name)]
    if file.is_ensemble:
        for name in ("model_name", "input_map", "output_map"):
            if not getattr(message, name):
                text = f"must specify '{name}' in step {index} of ensemble '{file.name}'"
                report.error("G026", file, step.path, text)
    elif len(targets) != 1:
        given = " and ".join(targets) or "none"
        text = f"step '{step.name}' must have one of model_name, node and graph; it has {given}"
        report.error("G025", file, step.path, text)
    if message.model_version < -1:
        text = f"model_version is {message.model_version}; give a version, or -1 for the latest"
        report.error("G025", file, f"{step.path}.model_version", text)
    has_weight = f"{step.path}.weight" in file.positions
    if has_weight and not (0 < message.weight < math.inf) and node.kind in (NodeKind.SPLITTER, NodeKind.ENSEMBLE):
        text = f"weight of step '{step.name}' is {message.weight:g}; it must be above 0 and finite"
        report.error("G014", file, f"{step.path}.weight", text)


def _check_combines(file: GraphFile, node: NodeDefinition, report: Report) -> None:
    outputs: set[str] = set()
    for i, combine in enumerate(node.message.ensemble.combine):
        path = f"{node.kind_path}.combine[{i}]"
        if not combine.output and combine.method != pb.Combine.KEYED:
            report.error("G025", file, path, f"the {pb.Combine.Method.Name(combine.method)} has no 'output'")
        elif combine.output in outputs:
            report.error("G005", file, f"{path}.output", f"'{combine.output}' has a 'combine' already")
        outputs.add(combine.output)


def _check_switch(file: GraphFile, node: NodeDefinition, report: Report) -> None:
    switch = node.message.switch
    cases: dict[str, str] = {}
    tests: dict[str, str] = {}
    otherwise = certain = ""
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
            text = "'case' has no effect in a switch without 'on'"
            report.error("G018", file, f"{path}.case[0]", text, is_name=True)
        if message.otherwise:
            if otherwise:
                report.error("G013", file, f"{path}.otherwise", f"step '{otherwise}' is 'otherwise' already")
            otherwise = otherwise or step.name
        if message.when:
            if message.when in tests:
                text = f"step '{tests[message.when]}' has the same test, so this one is never chosen"
                report.error("G013", file, f"{path}.when", text)
            tests.setdefault(message.when, step.name)
            constant = read_expression(message.when).constant
            certain = certain or (step.name if constant else "")
            if constant is False:
                report.error("G013", file, f"{path}.when", f"step '{step.name}' is never chosen")
    if switch.on and not cases:
        text = "'on' has no effect: no step has a 'case'"
        report.error("G018", file, f"{node.kind_path}.on", text, is_name=True)
    if not otherwise and not certain:
        text = f"switch '{node.name}' has no 'otherwise'; a request that matches no step fails"
        report.warning("G012", file, node.kind_path, text)
    elif otherwise and certain:
        text = f"step '{otherwise}' is never chosen: '{certain}' always is"
        report.error("G013", file, node.kind_path, text)


def _check_reachable(file: GraphFile, report: Report) -> None:
    """Nodes that no path from the root reaches, and steps whose node is not there."""
    reached: set[str] = set()
    waiting = [file.root]
    while waiting:
        node = file.nodes.get(waiting.pop())
        if node is not None and node.name not in reached:
            reached.add(node.name)
            waiting += [step.message.node for step in node.steps] if node.kind else _targets_of_unsupported(node)
    for node in file.all_nodes:
        if node.name and node.name not in reached and file.root in file.nodes:
            text = f"node '{node.name}' cannot be reached from '{file.root}'; no step names it"
            report.error("G004", file, f"{node.path}.name", text)
        for step in node.steps:
            if step.message.node and step.message.node not in file.nodes:
                text = f"unknown node '{step.message.node}'{suggestion(step.message.node, file.nodes)}"
                report.error("G002", file, f"{step.path}.node", text)


def _targets_of_unsupported(node: NodeDefinition) -> list[str]:
    return [step.node for step in node.message.cascade.step]
