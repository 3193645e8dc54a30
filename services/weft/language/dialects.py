"""The dialects of graph files: the graph language, and the ensembles of Triton Inference Server.

Everything in which the two differ stands here; a file gets its dialect when it is parsed (``dialect_of``).

Source:
    https://github.com/triton-inference-server/core/blob/main/src/ensemble_utils.cc
"""

from typing import ClassVar

from typing_extensions import override

from weft_protos import graph_pb2 as pb


class Dialect:
    """The graph language.

    Attributes:
        platform: What clients see as the platform; in messages the word for the whole.
        foreign_fields: Fields of the file that belong to the other dialect.
        required_fields: Fields of the file without which it means nothing.
        step_fields: All that a step may have; empty: every field.
        required_step_fields: Fields without which a step means nothing; empty: it has exactly one target.
        idle_fields: Fields of the file that may stand in a model's configuration, and have no effect here.
        wires_by_name: A tensor that no map names goes by its own name, from the nearest step before; else maps say all.
        must_read_all: A tensor that nothing reads is an error.
        may_repeat_declarations: An input or output may be declared twice alike.
        checks_decoupled: What the file says in ``decoupled`` must be so.
        proves_presence: A tensor that may be absent must not be needed anywhere; else that is a warning, the step fails
            in a request that lacks it, and an output that no step gives is left out of the answer.
        repeats_in_streams: What comes once for a request goes along with each response of a stream.
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

    def error_prefix(self, name: str, version: str) -> str:
        """What precedes the errors of a running graph."""
        return f"{name}/{version}: "

    def empty_node(self, graph: str, node: str) -> str:
        """A node without steps."""
        return f"must specify 'step' in node '{node}'"

    def unknown_output(self, graph: str, step: pb.Step, target: str, output: str) -> str:
        """``output_map`` names an output that ``target`` does not have."""
        return f"{target} has no output '{output}'"

    def unknown_input(self, graph: str, step: pb.Step, target: str, name: str) -> str:
        """``input_map`` names an input that ``target`` does not have."""
        return f"{target} has no input '{name}'"

    def second_producer(self, graph: str, tensor: str, first: str, second: str, index: int) -> str:
        """Step ``second``, the one of that index, gives a tensor that ``first`` gives."""
        return f"tensor '{tensor}' is an output of step '{first}' and of '{second}'; rename one with 'output_map'"

    def unread_input(self, graph: str, name: str) -> str:
        """Nothing reads an input of the graph."""
        return f"input '{name}' of graph '{graph}' is not used"

    def unwritten_output(self, graph: str, owner: str, output: str) -> str:
        """Nothing in ``owner`` gives an output that it declares."""
        return f"nothing in {owner} gives output '{output}'"

    def joined_streams(self, graph: str, step: str, model: str, streams: str) -> str:
        """A step reads responses of several streams."""
        return (
            f"step '{step}' joins responses of the decoupled steps {streams}, which may differ in number; let it read "
            "from one of them"
        )


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

    @override
    def error_prefix(self, name: str, version: str) -> str:
        return f"in ensemble '{name}', "

    @override
    def empty_node(self, graph: str, node: str) -> str:
        return f"must specify 'step' for ensemble '{graph}'"

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

    @override
    def second_producer(self, graph: str, tensor: str, first: str, second: str, index: int) -> str:
        return f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{graph}' step {index}"

    @override
    def unread_input(self, graph: str, name: str) -> str:
        return f"ensemble input '{name}' for ensemble '{graph}' is not used"

    @override
    def unwritten_output(self, graph: str, owner: str, output: str) -> str:
        return f"output '{output}' for ensemble '{graph}' is not written"

    @override
    def joined_streams(self, graph: str, step: str, model: str, streams: str) -> str:
        return (
            f"in ensemble {graph}, step of model '{model}' receives inputs originated from different decoupled models"
        )


GRAPH = Dialect()
TRITON = TritonDialect()


def dialect_of(message: pb.Graph) -> Dialect:
    """The dialect by ``platform``; without one, ``ensemble_scheduling`` says that it is Triton's."""
    is_triton = message.platform == TRITON.platform
    return TRITON if is_triton or (not message.platform and message.HasField("ensemble_scheduling")) else GRAPH
