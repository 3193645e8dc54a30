"""What is wrong with the message of a map, whatever its models are."""

from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft_protos import graph_pb2 as pb


def check_map(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    """Report lists that are not named (G027), a number of steps other than one (G027), and collects (G029, G005)."""
    message, path = node.message.map, node.kind_path
    if not message.over:
        text = f"map '{node.name}' has no 'over'; name the inputs whose rows its step gets, for example over: \"CROPS\""
        report.error("G027", file, path, text)
    for i, name in enumerate(message.over):
        if name in message.over[:i]:
            report.error("G027", file, f"{path}.over[{i}]", f"'{name}' is named already; leave one out")
        elif name == message.lengths:
            text = f"'{name}' says how many rows of the lists count, so it is no list itself; leave it out here"
            report.error("G027", file, f"{path}.over[{i}]", text)
    steps = [step for step in node.steps if not step.is_shadow]
    if len(steps) > 1:
        text = (
            f"map '{node.name}' has {len(steps)} steps, and runs one; put them into a node, for example a sequence, "
            'and let its step run that: step { node: "..." }'
        )
        report.error("G027", file, steps[1].path, text)
    _check_collects(file, node, report)


def _check_collects(file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
    seen: set[str] = set()
    named = {collect.output for collect in node.message.map.collect}
    for i, collect in enumerate(node.message.map.collect):
        path = f"{node.kind_path}.collect[{i}]"
        if not collect.output:
            report.error(
                "G029", file, path, "the 'collect' has no 'output'; name the output of the step that it is for"
            )
            continue
        if collect.output in seen:
            report.error("G029", file, f"{path}.output", f"'{collect.output}' has a 'collect' already; leave one out")
            continue
        seen.add(collect.output)
        why = "with STACK, where every row has one place; it belongs to LIST"
        report.refuse(file, path, [("lengths", bool(collect.lengths) and collect.method != pb.Collect.LIST)], why)
        lengths = lengths_name(node, collect.output)
        if lengths in named:
            where = f"{path}.lengths" if collect.lengths else path
            text = f"the lengths of '{collect.output}' are named '{lengths}', as another output; give them another name"
            report.error("G005", file, where, f'{text}: lengths: "..."')
        named |= {lengths} - {""}


def step_index(node: NodeDefinition) -> int:
    """Index of the step that runs for the rows; the others are shadows. -1 where there is none, which was reported."""
    return next((index for index, step in enumerate(node.steps) if not step.is_shadow), -1)


def lengths_name(node: NodeDefinition, tensor: str) -> str:
    """The output with the lengths of the rows of ``tensor``, where that is a LIST; "" for any other."""
    for collect in node.message.map.collect:
        if collect.output == tensor and collect.method == pb.Collect.LIST:
            return collect.lengths or f"{tensor}_LENGTHS"
    return ""
