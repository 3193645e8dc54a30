"""What a file says of the combines of an ensemble."""

from collections.abc import Iterable, Iterator

from weft.language.compiler.names import NodeNames
from weft.language.syntax.file import NodeDefinition
from weft.router.combine import METHODS, CombineMethod
from weft_protos import graph_pb2 as pb

#: Tensor that tells the model of a CUSTOM which steps answered.
MASK = "MASK"


def combines_of(node: NodeDefinition) -> Iterable[pb.Combine]:
    """Combines of an ensemble, KEYED where there is none; what lacks its 'output' is left out."""
    given = node.message.ensemble.combine
    if not given:
        return [pb.Combine(method=pb.Combine.KEYED)]
    return [combine for combine in given if combine.output or method_of(combine).is_keyed]


def method_of(combine: pb.Combine) -> CombineMethod:
    """How it combines."""
    return METHODS[pb.Combine.Method.Name(combine.method)]


def is_race(node: NodeDefinition) -> bool:
    """Whether the first answer of an ensemble is the node's."""
    combines = list(combines_of(node))
    return bool(combines) and all(method_of(combine).is_first for combine in combines)


def is_merge(node: NodeDefinition) -> bool:
    """Whether each response of each step of an ensemble is one of the node's."""
    return any(method_of(combine).is_merged for combine in combines_of(node))


def keyed_outputs(node: NodeDefinition, names: NodeNames, only: str) -> Iterator[tuple[str, int, str]]:
    """(output name, index of the step, its tensor) of a KEYED combine; ``only`` one tensor, or "" for all."""
    for i, step in enumerate(names.steps):
        for tensor in step.outputs.values():
            if only in ("", tensor):
                yield f"{node.steps[i].name}.{tensor}", i, tensor


def combined_tensor(combine: pb.Combine) -> str:
    """Tensor of the steps that a combine makes one of; "" where it is every one."""
    return getattr(combine, "from") or combine.output
