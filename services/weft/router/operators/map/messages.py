"""What a file says of a map."""

from weft.language.syntax.file import NodeDefinition
from weft_protos import graph_pb2 as pb


def step_index(node: NodeDefinition) -> int:
    """Index of the step that runs for the rows; the others are shadows. -1 where there is none, which was reported."""
    return next((index for index, step in enumerate(node.steps) if not step.is_shadow), -1)


def lengths_name(node: NodeDefinition, tensor: str) -> str:
    """The output with the lengths of the rows of ``tensor``, where that is a LIST; "" for any other."""
    for collect in node.message.map.collect:
        if collect.output == tensor and collect.method == pb.Collect.LIST:
            return collect.lengths or f"{tensor}_LENGTHS"
    return ""
