"""The dialects of graph files: the graph language, and the ensembles of Triton Inference Server.

All differences between the two are defined here; a file gets its dialect when it is parsed (``dialect_of``).

Source:
    https://github.com/triton-inference-server/core/blob/main/src/ensemble_utils.cc
"""

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from weft_protos import graph_pb2 as pb

Message = Callable[..., str]


class Dialect:
    """Rules of the graph language; subclasses change them.

    Attributes:
        platform: Platform shown to clients; messages call a graph by it.
        foreign_fields: Fields of the file that belong to the other dialect.
        required_fields: Fields that a file must have.
        step_fields: Fields that a step may have; empty: all.
        required_step_fields: Fields that a step must have; empty: exactly one target.
        idle_fields: Fields allowed because models' configurations have them, but ignored here.
        wires_by_name: Wire unmapped tensors by name, from the nearest earlier step; else maps must be complete.
        must_read_all: An unread tensor is an error.
        may_repeat_declarations: An input or output may be declared twice if equal.
        checks_decoupled: The file's ``decoupled`` must be true to the models.
        proves_presence: Requiring a tensor that may be absent is an error; else a warning: the step fails in a request
            that lacks it, and an output that no step gives is left out of the answer.
        repeats_in_streams: Tensors that exist once for a request are repeated in each response of a stream.
        keeps_rows: Each step gives as many rows as it gets.
    """

    platform: ClassVar[str] = "graph"
    foreign_fields: ClassVar[tuple[str, ...]] = ()
    required_fields: ClassVar[tuple[str, ...]] = ()
    step_fields: ClassVar[frozenset[str]] = frozenset()
    required_step_fields: ClassVar[tuple[str, ...]] = ()
    idle_fields: ClassVar[tuple[str, ...]] = ("version_policy",)
    wires_by_name: ClassVar[bool] = True
    must_read_all: ClassVar[bool] = False
    may_repeat_declarations: ClassVar[bool] = False
    checks_decoupled: ClassVar[bool] = True
    proves_presence: ClassVar[bool] = True
    repeats_in_streams: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True

    # Messages; each takes what stands behind it, in that order.
    #: What precedes the errors of a running graph: (graph, version).
    error_prefix: ClassVar[Message] = "{0}/{1}: ".format
    #: Whether a step's own text follows the prefix at once, and the place comes last.
    error_begins_with_text: ClassVar[bool] = False
    #: A node without steps: (graph, node).
    empty_node: ClassVar[Message] = "must specify 'step' in node '{1}'".format
    #: A step gives a tensor that another gives: (graph, tensor, first step, second step, index of that).
    second_producer: ClassVar[Message] = (
        "tensor '{1}' is an output of step '{2}' and of '{3}'; rename one with 'output_map'".format
    )
    #: Nothing reads an input of the graph: (graph, input).
    unread_input: ClassVar[Message] = "input '{1}' of graph '{0}' is not used".format
    #: Nothing in a node gives an output that it declares: (graph, node, output).
    unwritten_output: ClassVar[Message] = "nothing in {1} gives output '{2}'".format
    #: A step reads responses of several streams: (graph, step, model, streams).
    joined_streams: ClassVar[Message] = (
        "step '{1}' joins responses of the decoupled steps {3}, which may differ in number; let it read from one of "
        "them".format
    )

    def unknown_output(self, graph: str, step: pb.Step, target: str, output: str) -> str:
        """Error message for an ``output_map`` that names an output ``target`` does not have."""
        return f"{target} has no output '{output}'"

    def unknown_input(self, graph: str, step: pb.Step, target: str, name: str) -> str:
        """Error message for an ``input_map`` that names an input ``target`` does not have."""
        return f"{target} has no input '{name}'"


class TritonDialect(Dialect):
    """Ensembles of Triton Inference Server: its rules, and its messages."""

    platform = "ensemble"
    foreign_fields = ("node", "root", "policy", "import")
    required_fields = ("ensemble_scheduling",)
    step_fields = frozenset({"model_name", "model_version", "input_map", "output_map", "model_namespace"})
    required_step_fields = ("model_name", "input_map", "output_map")
    idle_fields = ()
    wires_by_name = False
    must_read_all = True
    may_repeat_declarations = True
    checks_decoupled = False
    proves_presence = False
    repeats_in_streams = False
    keeps_rows = False

    error_prefix = "in ensemble '{0}', ".format
    error_begins_with_text = True
    empty_node = "must specify 'step' for ensemble '{0}'".format
    second_producer = "ensemble tensor '{1}' can appear in an output map only once for ensemble '{0}' step {4}".format
    unread_input = "ensemble input '{1}' for ensemble '{0}' is not used".format
    unwritten_output = "output '{2}' for ensemble '{0}' is not written".format
    joined_streams = (
        "in ensemble {0}, step of model '{2}' receives inputs originated from different decoupled models".format
    )

    @override
    def unknown_output(self, graph: str, step: pb.Step, target: str, output: str) -> str:
        return (
            f"in ensemble {graph}, ensemble tensor {step.output_map[output]} is mapped from non-existing output "
            f"{output} in model {step.model_name}"
        )

    @override
    def unknown_input(self, graph: str, step: pb.Step, target: str, name: str) -> str:
        return (
            f"in ensemble {graph}, ensemble tensor {step.input_map[name]} is mapping to non-existing input {name} in "
            f"model {step.model_name}"
        )


GRAPH = Dialect()
TRITON = TritonDialect()


def dialect_of(message: pb.Graph) -> Dialect:
    """The dialect of a file: by ``platform``, else by whether it has ``ensemble_scheduling``."""
    is_triton = message.platform == TRITON.platform
    return TRITON if is_triton or (not message.platform and message.HasField("ensemble_scheduling")) else GRAPH
