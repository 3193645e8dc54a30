"""A map: one step for every row of lists whose length the data decides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from weft.language.compiler.names import NodeNames, narrowed
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.description import counted, given, offered, slot_name, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, NodePlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.map.build import build_map
from weft.router.operators.map.checks import check_map, lengths_name
from weft.router.operators.map.run import MapNode
from weft.router.operators.map.settings import NO_ROWS, MapSettings
from weft.router.operators.map.streamed import StreamedMapNode
from weft.router.steps import Node, NodeParts, OperatorPlan


@dataclass(frozen=True, slots=True)
class MapPlan(OperatorPlan):
    """A map; a frame of it holds lists, and that of a chunk rows, in slots of their own."""

    kind: ClassVar[str] = "map"
    path_form: ClassVar[PathForm] = PathForm.of("*(", ")")._replace(shows_nothing=True)
    runs_shadows: ClassVar[bool] = True
    watches: ClassVar[frozenset[str]] = frozenset({"when"})

    settings: MapSettings = NO_ROWS

    @property
    @override
    def batches_steps(self) -> bool | None:
        return self.settings.is_batched

    @property
    @override
    def counting_slots(self) -> tuple[int, ...]:
        return tuple(one.row_slot for one in self.settings.over)

    @property
    def counts_read(self) -> tuple[int, ...]:
        """The lengths of the lists."""
        return () if self.settings.lengths is None else self.settings.lengths[1:]

    def first_lost(self, lost: Sequence[int]) -> int | None:
        """A step that must not fail."""
        return next((index for index in lost if not self.steps[index].is_soft), None)

    @override
    def node(self, parts: NodeParts) -> Node:
        return (StreamedMapNode if self.streams else MapNode)(self, parts, self.settings)

    def describe(self) -> Description:
        """The step, and what it is run for."""
        settings = self.settings
        notes = [f"{counted(settings.chunk_rows, 'row')} at once" if settings.chunk_rows > 1 else "one by one"]
        notes.append(f"{counted(settings.max_inflight, 'chunk')} in work")
        if settings.max_rows:
            notes.append(f"at most {counted(settings.max_rows, 'row')}")
        if settings.lengths is not None:
            notes.append(f"as many as {settings.lengths[0]} says")
        flows: list[Flow] = []
        for index, step in enumerate(self.steps):
            flows.append(Flow(None, index, when_notes(step), given(step)))
            if step.shadow is None:
                flows.append(Flow(index, None, tensors=offered(step), gives=True))
        if self.streams:
            row = () if settings.index_slot < 0 else (f"{slot_name(self, settings.index_slot)}: the row",)
            return self._described("each response of each row, as it comes", row, notes, flows)
        collected = tuple(
            f"{one.name}: {'LIST' if one.is_list else 'STACK'}"
            + (f", lengths {slot_name(self, one.lengths)}" if one.lengths >= 0 else "")
            for one in settings.collects
        )
        return self._described("rows in order again", collected, notes, flows)

    def _described(
        self, title: str, collected: tuple[str, ...], notes: Sequence[str], flows: Sequence[Flow]
    ) -> Description:
        lists = " and ".join(one.name for one in self.settings.over)
        return Description(
            kind=self.kind,
            steps=self.steps,
            entry=End(f"each row of {lists}", tuple(notes)),
            exit=End(title, collected),
            flows=tuple(flows),
            each=f"{'chunk' if self.settings.chunk_rows > 1 else 'row'} of {lists}",
        )


class MapKind(NodeKind):
    """Maps in a file."""

    plan = MapPlan

    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Lists, the number of steps, and collects."""
        check_map(file, node, report)

    def why_no_stream(self, node: NodeDefinition) -> str:
        """Its step may; then it makes no lists."""
        return ""

    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        """The lists."""
        return set(node.message.map.over)

    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        """The lists and their lengths, but for what the step's ``when`` tests."""
        tested = {tensor for step in node.steps if not step.is_shadow for tensor in narrowed(step)}
        return {*node.message.map.over, node.message.map.lengths} - {"", *tested}

    def inputs_read(self, node: NodeDefinition) -> set[str]:
        """The lengths of the lists."""
        return {node.message.map.lengths} - {""}

    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What the step gives, and the lengths of what becomes a LIST."""
        tensors = dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values())
        yield from tensors
        yield from (name for tensor in tensors if (name := lengths_name(node, tensor)))
        yield from [node.message.map.index] * (node.message.map.index not in ("", *tensors))

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        built, types = build_map(builder, scope)
        if built is None:
            return None, types
        return replace(scope.node_plan(MapPlan, built.steps, built.slots), settings=built.settings), types
