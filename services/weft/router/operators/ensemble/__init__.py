"""The ensemble: runs all steps at once and combines their answers.

Each step's answers have slots of their own; a combine merges several into one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from weft.language.compiler.names import NodeNames, Wire, describe, target_path
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import BuiltStep, ResponseCount, Scope, declared_types, declaring
from weft.language.compiler.state import check_rows
from weft.language.compiler.uses import declared_uses
from weft.language.plan import Binding, NodePlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType, dims_fit, fits, merged, shape_text
from weft.router.combine import CombinedDims, CombineMethod
from weft.router.operators.ensemble.checks import (
    MASK,
    check_combines,
    check_idle,
    check_quorum,
    combined_tensor,
    combines_of,
    is_merge,
    is_race,
    keyed_outputs,
    method_of,
)
from weft.router.operators.ensemble.run import CombinePlan, EnsemblePlan
from weft_protos import graph_pb2 as pb

__all__ = ["CombinePlan", "EnsembleKind", "EnsemblePlan"]


class EnsembleKind(NodeKind):
    """The ensemble in graph files: fields, checks, compilation."""

    plan = EnsemblePlan
    step_fields = frozenset({"weight"})
    custom_words = "the model of a CUSTOM"

    @override
    def custom_steps(self, message: pb.Node, path: str) -> Iterator[tuple[int, str, pb.Step]]:
        for i, combine in enumerate(message.ensemble.combine):
            if method_of(combine).calls_model:
                yield i, f"{path}.combine[{i}].custom", combine.custom

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_combines(file, node, report)
        check_quorum(file, node, report)

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_idle(file, node, report)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """One step may stream; several only if their responses are not combined, which ``build`` checks."""
        return ""

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        read: set[str] = set()
        for combine in combines_of(node):
            tensor = combined_tensor(combine)
            read |= {tensor} if tensor else {one for step in names.steps for one in step.outputs.values()}
        return read

    @override
    def custom_wires(self, node: NodeDefinition, key: int, wires: Sequence[Wire]) -> list[Wire]:
        """Remove the combined tensor and the mask, which the node itself provides."""
        combined = combined_tensor(node.message.ensemble.combine[key])
        is_fed = any(wire.tensor == combined for wire in wires)  # reported later if not
        return [one for one in wires if one.tensor not in (combined, MASK) and (is_fed or one.is_mapped)]

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        for combine in combines_of(node):
            if method_of(combine).is_keyed:
                yield from (name for name, _, _ in keyed_outputs(node, names, getattr(combine, "from")))
            else:
                yield combine.output

    @override
    def has_known_outputs(self, node: NodeDefinition) -> bool:
        return all(one.output or method_of(one).is_keyed for one in node.message.ensemble.combine)

    @override
    def output_cure(self, name: str, given: Sequence[str]) -> str:
        """Suggest a combine of the steps' tensors of that name."""
        if not any(one.endswith(f".{name}") for one in given):
            return ""
        return f'to make it of the steps\' tensors, add combine {{ output: "{name}" method: ... }}'

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        return _EnsembleBuilder(builder, scope).build()


@dataclass(frozen=True, slots=True, eq=False)
class _Combine:
    """One output of an ensemble.

    Attributes:
        index, path: Of ``message`` in the file.
        sources: (index of the step, its tensor) of every step that offers one.
    """

    output: str
    method: CombineMethod
    message: pb.Combine
    index: int
    path: str
    sources: list[tuple[int, str]]

    def axis(self, dims: Sequence[int]) -> int:
        """The axis counted from the end of the result, so that it does not depend on a batch dimension."""
        given = self.message.axis
        return given - len(dims) if self.method.takes_axis and given >= 0 else given


class _EnsembleBuilder:
    def __init__(self, builder: NodeBuilder, scope: Scope) -> None:
        self._builder = builder
        self._report = builder.report
        self._scope = scope
        self._node = scope.node
        self._names = scope.names.steps
        self._message = scope.node.message.ensemble

    def build(self) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """Compile the ensemble; a step whose tensors are not read is left out, unless a quorum counts it."""
        builder, scope, node, names = self._builder, self._scope, self._node, self._names
        if is_race(node):
            check_rows(scope, builder.names, self._report, "the first answer of an ensemble cancels the other calls")
        combines = self._combines()
        kept = self._kept(combines)
        read = {source for combine in kept for source in combine.sources}
        live = sorted(range(len(names)) if self._message.quorum else {i for i, _ in read})
        required = {source for combine in kept if combine.output in scope.call.required for source in combine.sources}
        slots: dict[tuple[int, str], int] = {}
        built: list[BuiltStep] = []
        for i, step in enumerate(names):
            own = {tensor: scope.new_slot(tensor) for tensor in step.outputs.values() if (i, tensor) in read}
            built.append(builder.step(scope, i, own, [tensor for step_index, tensor in required if step_index == i]))
            if i not in live:
                scope.streaming.pop(i, None)
            for tensor, slot in own.items():
                slots[i, tensor] = slot
                scope.note(slot, f"{node.steps[i].name}.{tensor}", built[i].outputs[tensor])
        types: dict[str, TensorType] = {}
        made: dict[str, CombinePlan] = {}
        for combine in combines:
            known = self._combined_type(combine, [built[i].outputs[tensor] for i, tensor in combine.sources])
            if combine in kept:
                sources = tuple((live.index(i), slots[i, tensor]) for i, tensor in combine.sources)
                output = sources[0][1] if combine.method.is_keyed else scope.new_slot(combine.output)
                merge: CombinePlan | None = CombinePlan(
                    output, combine.method, sources, combine.message.weighted, combine.axis(known.dims)
                )
                if merge is not None and combine.method.calls_model:
                    merge, known = self._custom(combine, merge, known)
                if merge is not None:
                    made[combine.output] = merge
            types[combine.output] = self._present(combine, known, built, len(live))
        for name, merge in made.items():
            scope.note(merge.output, name, types[name])
        self._check_streams()
        steps = [step_plan for i in live if (step_plan := built[i].plan)]
        if len(steps) != len(live) or len(made) != len(kept):
            return None, types
        plan = scope.node_plan(EnsemblePlan, steps, {name: combine.output for name, combine in made.items()})
        quorum, straggler_ms = self._message.quorum, self._message.straggler_ms
        return replace(plan, combines=tuple(made.values()), quorum=quorum, straggler_ms=straggler_ms), types

    def _combined_type(self, combine: _Combine, types: Sequence[TensorType]) -> TensorType:
        """Type of a combined tensor, or of what a model combines; reports what cannot be (G007, G008, G015).

        Args:
            types: Of ``combine.sources``. The result is certain to be there; whether it is, the caller knows.
        """
        place = self._scope.file.place(combine.path)
        origin = f"{combine.method.name} of node '{self._node.name}' ({place})"
        known = [one for one in types if one.is_known]
        if not known:
            return TensorType.unknown(origin)
        if combine.method.is_keyed:
            return types[0].present()
        if not (self._is_allowed(combine, known) and self._agree(combine, known)):
            return TensorType.unknown(origin)
        result = merged(known, origin).present()
        is_complete = len(known) == len(types) and not any(one.is_optional for one in types)
        axis = combine.axis(result.dims)
        dims = CombinedDims(result.dims, [one.dims for one in known], axis, len(types), is_complete)
        if combine.method.adds_axis:
            return self._on_new_axis(combine, result, dims)
        return replace(result, dims=combine.method.dims(dims))

    def _is_allowed(self, combine: _Combine, known: Sequence[TensorType]) -> bool:
        """Whether the method supports these tensors and this axis."""
        method, path, first, file = combine.method, combine.path, known[0], self._scope.file
        allowed = method.datatypes
        wrong = next((one for one in known if allowed is not None and one.datatype not in allowed.names), None)
        if allowed is not None and wrong is not None:
            text = f"{method.name} takes {allowed.words}; it gets {wrong} from {wrong.origin}; {allowed.others}"
            self._report.error("G015", file, f"{path}.method", text)
            return False
        if remark := method.remark(first.datatype):
            self._report.warning("G015", file, f"{path}.method", remark)
        rank, axis = len(first.dims) + method.adds_axis, combine.message.axis
        if method.takes_axis and not -rank <= axis < rank:
            text = (
                f"axis {axis} is not an axis of the result, which has {rank} of them beside the batch dimension; give "
                f"{-rank} to {rank - 1}"
            )
            self._report.error("G008", file, f"{path}.axis", text)
            return False
        if method.calls_model and file.is_batched and not first.is_batched:
            text = f"{method.name} needs tensors with a batch dimension; it gets {first} from {first.origin}"
            self._report.error("G008", file, path, text)
            return False
        return True

    def _agree(self, combine: _Combine, known: Sequence[TensorType]) -> bool:
        """Whether datatypes and shapes are equal, except along the concatenated axis."""
        first = known[0]
        for other in known[1:]:
            if combine.method.is_free_along_axis:
                is_fit = _fits_beside(first, other, combine.axis(first.dims))
            else:
                is_fit = fits(first, other)
            if other.datatype != first.datatype or not is_fit:
                code = "G007" if other.datatype != first.datatype else "G008"
                text = (
                    f"{combine.method.name} needs tensors that agree; it gets {first} from {first.origin}, and "
                    f"{other} from {other.origin}"
                )
                self._report.error(code, self._scope.file, combine.path, text)
                return False
        return True

    def _on_new_axis(self, combine: _Combine, one: TensorType, dims: CombinedDims) -> TensorType:
        """Type of tensors like ``one`` stacked on a new axis; its origin has the axis that yields the declared type."""
        rank = len(one.dims) + 1
        given, owner = combine.message.axis % rank, declaring(self._scope.file, self._node)
        types = [replace(one, dims=combine.method.dims(dims._replace(axis=axis))) for axis in range(rank)]
        declared = declared_types(self._scope.file, self._node, owner.output).get(combine.output)
        fitting = [axis for axis, known in enumerate(types) if declared and fits(known, declared)]
        if not fitting or given in fitting:
            return types[given]
        why = ": the batch dimension is not counted" * one.is_batched
        cure = f"; 'axis: {fitting[0]}' gives {shape_text(types[fitting[0]].full_dims)}{why}"
        return replace(types[given], origin=one.origin + cure)

    def _custom(
        self, combine: _Combine, plan: CombinePlan, stacked: TensorType
    ) -> tuple[CombinePlan | None, TensorType]:
        """Plan of a combine by a model, with its call and two more slots, and the type of the model's output."""
        scope, file, builder, method = self._scope, self._scope.file, self._builder, combine.method.name
        step, names = self._node.customs.get(combine.index), scope.names.customs.get(combine.index)
        if step is None or names is None:  # reported already
            return None, TensorType.unknown(f"a {method} without a model")
        tensor, path = combined_tensor(combine.message), target_path(step)
        target, uses = builder.names.of_target(names.target), declared_uses(names, is_batched=file.is_batched)
        sources = {name: step.message.input_map.get(name, name) for name in target.inputs}
        if tensor not in sources.values() and not target.is_open:
            text = (
                f"no input of {describe(names.target)} is named '{tensor}', the tensor that {method} combines; name "
                f'one: input_map {{ key: "{next(iter(target.inputs), "")}" value: "{tensor}" }}'
            )
            self._report.error("G006", file, path, text)
            return None, TensorType.unknown(f"a {method}")
        mask = TensorType("BOOL", stacked.dims[:1], stacked.is_batched, is_optional=False, origin=f"{method}, its mask")
        made = [(tensor, stacked)] + [(MASK, mask)] * (MASK in sources.values())
        slots = {name: scope.new_slot(f"{combine.output}.{name}", known) for name, known in made}
        inputs: list[Binding] = []
        for name, source in sources.items():
            if source in slots:
                inputs.append(Binding(name, slots[source]))
                what = f"input '{name}' of {describe(names.target)}"
                known = mask if source == MASK and source != tensor else stacked
                if stacked.is_known and name in uses:
                    builder.check_use(file, path, known, uses[name], is_required=False, what=what)
        built = builder.stand_alone(scope, step, names, {combine.output: plan.output})
        given = built.answered.get(combine.output)
        if given is None and not target.is_open:
            text = (
                f"{describe(names.target)} gives no '{combine.output}', the output of the {method}; map one: "
                f'output_map {{ key: "{next(iter(names.outputs), "")}" value: "{combine.output}" }}'
            )
            self._report.error("G017", file, path, text)
        if built.plan is None or given is None:
            return None, given or TensorType.unknown(f"a {method}")
        call = replace(built.plan, inputs=(*built.plan.inputs, *inputs))
        return replace(plan, custom=call, stack=slots[tensor], mask=slots.get(MASK, -1)), given

    def _combines(self) -> list[_Combine]:
        """The combines with their sources; reports steps without the tensor."""
        node, names, file = self._node, self._names, self._scope.file
        found: list[_Combine] = []
        lacking: set[tuple[int, str]] = set()
        for k, message in enumerate(self._message.combine or [pb.Combine(method=pb.Combine.KEYED)]):
            path = f"{node.kind_path}.combine[{k}]"
            method, tensor = method_of(message), combined_tensor(message)
            if method.is_keyed:
                only = getattr(message, "from")
                outputs = list(keyed_outputs(node, self._scope.names, only))
                found += [_Combine(output, method, message, k, path, [(i, source)]) for output, i, source in outputs]
                if not outputs and only and not any(step.is_open for step in names):
                    given = [name for step in names for name in step.outputs.values()]
                    self._builder.missing_output(file, f"{path}.from", f"no step gives '{only}'", only, given)
            elif message.output:
                combine = _Combine(message.output, method, message, k, path, [])
                for i, step in enumerate(names):
                    if tensor in step.outputs.values():
                        combine.sources.append((i, tensor))
                    elif not step.is_open and (i, tensor) not in lacking:
                        lacking.add((i, tensor))
                        text = f"step '{node.steps[i].name}' gives no '{tensor}', which {method.name} combines"
                        where, given = target_path(node.steps[i]), list(step.outputs.values())
                        self._builder.missing_output(file, where, text, tensor, given)
                found.append(combine)
        if not self._report.has_errors:
            read = {i for combine in found for i, _ in combine.sources}
            for i, definition in enumerate(node.steps):
                if i not in read and found and not names[i].is_open:
                    what = "only counts for the quorum" if self._message.quorum else "never runs"
                    text = f"step '{definition.name}' {what}: no 'combine' reads its outputs"
                    self._report.warning("G026", file, target_path(definition), text)
        return self._distinct(found)

    def _distinct(self, combines: Sequence[_Combine]) -> list[_Combine]:
        """The first combine of each output; reports a second, unless the file names both (reported before)."""
        first: dict[str, _Combine] = {}
        reported: set[str] = set()
        for combine in combines:
            before = first.setdefault(combine.output, combine)
            is_second = before is not combine and (before.method.is_keyed or combine.method.is_keyed)
            if is_second and combine.path not in reported:
                reported.add(combine.path)
                text = f"output '{combine.output}' is made already"
                if before.path == combine.path:
                    text += "; rename one of the steps, KEYED names outputs STEP.TENSOR"
                else:
                    text += f", by the 'combine' at {self._scope.file.place(before.path)}; leave one out"
                self._report.error("G005", self._scope.file, combine.path, text)
        return list(first.values())

    def _kept(self, combines: Sequence[_Combine]) -> list[_Combine]:
        """Combines whose output is read.

        All are kept if only those that take the first answer would remain, which would make it a race.
        """
        useful = [combine for combine in combines if combine.sources]
        kept = [combine for combine in useful if combine.output in self._scope.call.wanted]
        is_race_now = all(combine.method.is_first for combine in kept)
        return useful if is_race_now and not is_race(self._node) else kept

    def _present(self, combine: _Combine, known: TensorType, built: Sequence[BuiltStep], num_steps: int) -> TensorType:
        """Type of a combined tensor, which may be absent if every step that gives it may be missing.

        It is present if a HARD step always gives it, or if more answers are needed than the other steps can give. A
        merged tensor may be absent if one step's answer may lack it.
        """
        offers = [built[i].outputs[tensor] for i, tensor in combine.sources]
        answers = [built[i].answered[tensor] for i, tensor in combine.sources]
        optional = next((offer for offer in offers if offer.is_optional), None)
        if optional is None or any(step.is_open for step in self._names):
            return known
        if combine.method.is_merged:
            lacking = next((answer for answer in answers if answer.is_optional), None)
            return known if lacking is None else known.absent_like(lacking)
        has_hard = not all(offer.is_optional for offer in offers) and not is_race(self._node)
        num_answering = sum(not answer.is_optional for answer in answers)
        needed = max(self._message.quorum, 1)
        return known if has_hard or num_answering + needed > num_steps else known.absent_like(optional)

    def _check_streams(self) -> None:
        """Determine the ensemble's number of responses, and report combines that would join streams (G019)."""
        node, streaming = self._node, self._scope.streaming
        if is_merge(node):
            streaming.update(dict.fromkeys(range(len(node.steps)), ResponseCount.MANY))
        elif not is_race(node) and len(streaming) > 1:
            first, *others = sorted(streaming)
            for index in others:
                text = (
                    f"step '{node.steps[index].name}' streams, and so does '{node.steps[first].name}': their responses "
                    "may differ in number, so that no 'combine' can join them; take method: FIRST (the one that speaks "
                    "first) or MERGE (each response as it comes)"
                )
                self._report.error("G019", self._scope.file, target_path(node.steps[index]), text)


def _fits_beside(left: TensorType, right: TensorType, axis: int) -> bool:
    """Whether two tensors can be concatenated along ``axis``."""
    if len(left.dims) != len(right.dims):
        return False
    free = list(right.dims)
    free[axis] = left.dims[axis]
    return dims_fit(left.dims, tuple(free))
