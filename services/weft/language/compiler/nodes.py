"""Compiles nodes to node plans: types flow from the graph's inputs to its outputs, and every tensor gets a slot.

A node is compiled once for each step that runs it, because its types depend on that step.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import KindNames, target_path
from weft.language.compiler.scope import (
    BuiltNode,
    NodeUse,
    Scope,
    declared_types,
    declaring,
    inner_types,
    owner_text,
)
from weft.language.compiler.state import CODE, stateful_model
from weft.language.compiler.steps import StepBuilder
from weft.language.plan import Binding, NodePlan, PolicyPlan, Reshaping
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import KEY
from weft.language.types.signatures import TensorType


class NodeKind(KindNames):
    """Compiles nodes of one kind; implemented in ``weft.router.operators``.

    Attributes:
        checks_outputs: ``build`` checks the steps' outputs against those that the node declares.
    """

    checks_outputs: ClassVar[bool] = False

    def has_known_outputs(self, node: NodeDefinition) -> bool:
        """Whether the file determines the outputs; if not, that was reported."""
        return True

    def output_cure(self, name: str, given: Sequence[str]) -> str:
        """How the node could give the missing output ``name``; "" if it cannot."""
        return ""

    @abstractmethod
    def build(
        self, builder: "NodeBuilder", scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """Compile a node: return its plan (None after a reported error) and the types of its outputs."""


class NodeBuilder(StepBuilder):
    """Compiles nodes of every kind."""

    cache: PolicyPlan | None = None

    def __init__(self, names: NameTable, kinds: Mapping[str, NodeKind], report: GraphReport) -> None:
        super().__init__(names, report)
        self._kinds = kinds

    def build_node(self, file: GraphFile, node: NodeDefinition, call: NodeUse) -> BuiltNode:
        """Compile a node for one use: report errors, give every tensor a slot."""
        self.num_nodes += 1
        names = self.names.of(file, node)
        owner = declaring(file, node)
        outer_inputs = declared_types(file, node, owner.input)
        inner_inputs = inner_types(file, node, outer_inputs, owner.input)
        inputs = {
            name: known if name not in call.given or call.given[name].is_optional else known.present()
            for name, known in inner_inputs.items()
        } or {name: call.given[name] for name in names.inputs if name in call.given}
        scope = Scope(file, node, names, call, inputs)
        for name, known in inputs.items():
            scope.slots[name] = scope.new_slot(name, known)
        outer_outputs = declared_types(file, node, owner.output)
        declared = inner_types(file, node, outer_outputs, owner.output)
        plan: NodePlan | None = None
        produced: dict[str, TensorType] = {}
        kind = self._kinds[node.kind.name] if node.kind is not None else None
        if kind is not None:
            plan, produced = kind.build(self, scope, declared)
            self._check_streams(scope, kind)
        if len(call.trail) == 1:
            self.cache = self._graph_cache(scope)
            if self.cache is not None and (found := stateful_model(names.steps, self.names)):
                text = f"{found} keeps the state of sequences (sequence_batching), and a cache hides requests from it"
                self.report.error(CODE, file, "policy.cache", f"{text}; leave 'cache' out", is_name=True)
        shadows = self.shadows(scope)
        if len(shadows) != len(node.shadows):
            plan = None
        if plan is not None:
            policy = node.message.policy
            plan = replace(
                plan,
                num_slots=scope.num_slots,
                shadows=tuple(shadows),
                timeout_ms=policy.timeout_ms,
                max_inflight=policy.max_inflight,
                reshaped_inputs=_reshapings(plan.inputs, outer_inputs, inner_inputs),
                reshaped_outputs=_reshapings(plan.outputs, declared, outer_outputs),
            )
        outputs = self._outputs(scope, kind, declared, produced)
        outputs = {name: replace(known, dims=outer_outputs.get(name, known).dims) for name, known in outputs.items()}
        return BuiltNode(plan, outputs, scope.responses)

    def _check_streams(self, scope: Scope, kind: NodeKind) -> None:
        file, node = scope.file, scope.node
        why = kind.why_no_stream(node)
        for index in sorted(scope.streaming) if why else ():
            self.report.error("G040", file, target_path(node.steps[index]), f"{self.stream_text(scope, index)}; {why}")
        if not scope.streaming or not kind.plan.runs_shadows:
            return
        for step in node.steps:  # it runs for each response or row, and the node has no answer to that
            if step.message.shadow.HasField("mirror_compare"):
                what = f"{self.stream_text(scope, min(scope.streaming))}: a copy has no whole answer beside it"
                cure = "leave 'mirror_compare' out, or put the shadow into the node that streams"
                self.report.error("G042", file, f"{step.path}.shadow.mirror_compare", f"{what}; {cure}")

    def _graph_cache(self, scope: Scope) -> PolicyPlan | None:
        message, found = scope.file.message, None
        for kind in scope.file.policies.values():
            path = kind.condition_path("policy")
            condition = self.condition(scope, path, KEY) if path else None
            found = found or kind.plan_of_graph(message, condition)
        return found

    def _outputs(
        self,
        scope: Scope,
        kind: NodeKind | None,
        declared: Mapping[str, TensorType],
        produced: Mapping[str, TensorType],
    ) -> dict[str, TensorType]:
        file, node, names = scope.file, scope.node, scope.names
        if kind is not None and not kind.checks_outputs:
            self._check_declared(scope, kind, declared, produced)
        if node.name == file.root:
            self._check_present(scope, declared, produced)
        if declared:
            made = {name: produced.get(name, known) for name, known in declared.items()}
            return {n: replace(known.absent_like(made[n]), labels=made[n].labels) for n, known in declared.items()}
        return {name: produced.get(name, TensorType.unknown(f"node '{node.name}'")) for name in names.outputs}

    def _check_declared(
        self, scope: Scope, kind: NodeKind, declared: Mapping[str, TensorType], produced: Mapping[str, TensorType]
    ) -> None:
        file, node = scope.file, scope.node
        prefix = "" if node.name == file.root else f"{node.path}."
        is_open = any(step.is_open for step in scope.names.steps)
        given = [*scope.inputs, *scope.produced] if kind.plan.is_pipeline else list(produced)
        for i, (name, used) in enumerate(declared.items()):
            path, value = f"{prefix}output[{i}].name", produced.get(name)
            if value is not None:
                what = f"output '{name}' of {owner_text(file, node)}"
                self.check_use(file, path, value, used, is_required=False, what=what, declared=used)
            elif not is_open and kind.has_known_outputs(node):
                text = file.dialect.unwritten_output(file.name, owner_text(file, node), name)
                if cure := kind.output_cure(name, given):
                    text += f"; {cure}"
                else:
                    text += self.shadow_of(scope, name) or suggestion(name, given)
                self.report.error("G017", file, path, text)

    def _check_present(
        self, scope: Scope, declared: Mapping[str, TensorType], produced: Mapping[str, TensorType]
    ) -> None:
        """Check that a graph's outputs are in every answer, unless optional or copies of an optional input."""
        file, node, order = scope.file, scope.node, list(declared)
        for name in required_outputs(file, scope.names.outputs):
            known = produced.get(name)
            if known is None or not known.is_optional or not known.absence:
                continue
            path = f"output[{order.index(name)}].name" if name in order else node.kind_path
            text = (
                f"output '{name}' of {owner_text(file, node)} must be in every answer, but it may be absent; it comes "
                f"from {known.origin}; {known.absence}, or declare the output with 'optional: true'"
            )
            self.report.error("G010", file, path, text)


def required_outputs(file: GraphFile, outputs: Iterable[str]) -> list[str]:
    """The graph's outputs that every answer must have."""
    optional = {spec.name for spec in file.message.output if spec.optional}
    return [name for name in outputs if name not in optional] if file.dialect.proves_presence else []


def _reshapings(
    bindings: Iterable[Binding], before: Mapping[str, TensorType], after: Mapping[str, TensorType]
) -> tuple[Reshaping, ...]:
    return tuple(
        Reshaping(slot, before[name].dims, after[name].dims)
        for name, slot in bindings
        if name in before and before[name].dims != after[name].dims
    )
