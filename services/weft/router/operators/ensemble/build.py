"""From an ensemble to its plan: every step's answers get slots of their own, a combine makes one tensor of several."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.language.compiler.names import describe, target_path
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import BuiltStep, Scope, declared_types, declaring
from weft.language.compiler.state import check_rows
from weft.language.compiler.uses import declared_uses
from weft.language.plan import Binding, StepPlan
from weft.language.types.signatures import TensorType, dims_fit, fits, merged, shape_text
from weft.router.combine import CombineMethod
from weft.router.combine.method import CombinedDims
from weft.router.operators.ensemble.checks import MASK, combined_tensor, is_race, keyed_outputs, method_of
from weft.router.operators.ensemble.run import CombinePlan
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Combine:
    """One output of an ensemble.

    Attributes:
        sources: (index of the step, its tensor) of every step that offers one.
    """

    output: str
    method: CombineMethod
    message: pb.Combine
    index: int
    path: str
    sources: list[tuple[int, str]]

    def axis(self, dims: Sequence[int]) -> int:
        """The axis counted from the end of the result, so that a batch dimension changes nothing."""
        given = self.message.axis
        return given - len(dims) if self.method.takes_axis and given >= 0 else given


class CombineBuilder:
    """Compiles combines."""

    def __init__(self, builder: NodeBuilder, scope: Scope) -> None:
        self._builder = builder
        self._report = builder.report
        self._scope = scope

    def combined_type(self, combine: Combine, types: Sequence[TensorType]) -> TensorType:
        """Type of a combined tensor, or of what a model combines; reports what cannot be (G007, G008, G015).

        Args:
            types: Of ``combine.sources``. The result is certain to be there; whether it is, the caller knows.
        """
        place = self._scope.file.place(combine.path)
        origin = f"{combine.method.name} of node '{self._scope.node.name}' ({place})"
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
            return _on_new_axis(self._scope, combine, result, dims)
        return replace(result, dims=combine.method.dims(dims))

    def _is_allowed(self, combine: Combine, known: Sequence[TensorType]) -> bool:
        method, path, first = combine.method, combine.path, known[0]
        allowed = method.datatypes
        wrong = next((one for one in known if allowed is not None and one.datatype not in allowed.names), None)
        if allowed is not None and wrong is not None:
            text = f"{method.name} takes {allowed.words}; it gets {wrong} from {wrong.origin}; {allowed.others}"
            self._report.error("G015", self._scope.file, f"{path}.method", text)
            return False
        if remark := method.remark(first.datatype):
            self._report.warning("G015", self._scope.file, f"{path}.method", remark)
        rank, axis = len(first.dims) + method.adds_axis, combine.message.axis
        if method.takes_axis and not -rank <= axis < rank:
            text = (
                f"axis {axis} is not an axis of the result, which has {rank} of them beside the batch dimension; give "
                f"{-rank} to {rank - 1}"
            )
            self._report.error("G008", self._scope.file, f"{path}.axis", text)
            return False
        if method.calls_model and self._scope.file.is_batched and not first.is_batched:
            text = f"{method.name} needs tensors with a batch dimension; it gets {first} from {first.origin}"
            self._report.error("G008", self._scope.file, path, text)
            return False
        return True

    def _agree(self, combine: Combine, known: Sequence[TensorType]) -> bool:
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

    def custom(self, combine: Combine, plan: CombinePlan, stacked: TensorType) -> tuple[CombinePlan | None, TensorType]:
        """The plan of a combine with its call and two more slots, and the type of what the model gives.

        Returns:
            None for the plan where an error was reported.
        """
        method = combine.method.name
        step, names = self._scope.node.customs.get(combine.index), self._scope.names.customs.get(combine.index)
        if step is None or names is None:  # reported already
            return None, TensorType.unknown(f"a {method} without a model")
        file, tensor, path = self._scope.file, combined_tensor(combine.message), target_path(step)
        target, uses = self._builder.names.of_target(names.target), declared_uses(names, is_batched=file.is_batched)
        sources = {name: step.message.input_map.get(name, name) for name in target.inputs}
        if tensor not in sources.values() and not target.is_open:
            text = (
                f"no input of {describe(names.target)} is named '{tensor}', the tensor that {method} combines; name "
                f'one: input_map {{ key: "{next(iter(target.inputs), "")}" value: "{tensor}" }}'
            )
            self._report.error("G006", file, path, text)
            return None, TensorType.unknown(f"a {method}")
        mask = TensorType("BOOL", stacked.dims[:1], stacked.is_batched, is_optional=False, origin=f"{method}, its mask")
        slots: dict[str, int] = {}
        made = [(tensor, stacked)] + [(MASK, mask)] * (MASK in sources.values())
        for name, known in made:
            slots[name] = self._scope.new_slot(f"{combine.output}.{name}", known)
        inputs: list[Binding] = []
        for name, source in sources.items():
            if source in slots:
                inputs.append(Binding(name, slots[source]))
                what = f"input '{name}' of {describe(names.target)}"
                known = mask if source == MASK and source != tensor else stacked
                if stacked.is_known and name in uses:
                    self._builder.check_use(file, path, known, uses[name], is_required=False, what=what)
        built = self._builder.stand_alone(self._scope, step, names, {combine.output: plan.output})
        given = built.answered.get(combine.output)
        if given is None and not target.is_open:
            first = next(iter(names.outputs), "")
            text = (
                f"{describe(names.target)} gives no '{combine.output}', the output of the {method}; map one: "
                f'output_map {{ key: "{first}" value: "{combine.output}" }}'
            )
            self._report.error("G017", file, path, text)
        known = given or TensorType.unknown(f"a {method}")
        if built.plan is None or given is None:
            return None, known
        call: StepPlan = replace(built.plan, inputs=(*built.plan.inputs, *inputs))
        return replace(plan, custom=call, stack=slots[tensor], mask=slots.get(MASK, -1)), known


def _on_new_axis(scope: Scope, combine: Combine, one: TensorType, dims: CombinedDims) -> TensorType:
    """Type of tensors like ``one`` on a new axis, its origin with the axis that would make what the node declares."""
    rank = len(one.dims) + 1
    given = combine.message.axis % rank
    types = [replace(one, dims=combine.method.dims(dims._replace(axis=axis))) for axis in range(rank)]
    declared = declared_types(scope.file, scope.node, declaring(scope.file, scope.node).output).get(combine.output)
    fitting = [axis for axis, known in enumerate(types) if declared and fits(known, declared)]
    if not fitting or given in fitting:
        return types[given]
    why = ": the batch dimension is not counted" * one.is_batched
    cure = f"; 'axis: {fitting[0]}' gives {shape_text(types[fitting[0]].full_dims)}{why}"
    return replace(types[given], origin=one.origin + cure)


def _fits_beside(left: TensorType, right: TensorType, axis: int) -> bool:
    if len(left.dims) != len(right.dims):
        return False
    free = list(right.dims)
    free[axis] = left.dims[axis]
    return dims_fit(left.dims, tuple(free))


class Members(NamedTuple):
    """The compiled parts of an ensemble."""

    steps: list[StepPlan]
    combines: dict[str, CombinePlan]


def build_members(builder: NodeBuilder, scope: Scope) -> tuple[Members | None, dict[str, TensorType]]:
    """The parts of an ensemble, None where an error was reported, and types of its outputs.

    A step whose tensors are not read is left out, unless a quorum counts it.
    """
    node, names = scope.node, scope.names.steps
    if is_race(node):
        check_rows(scope, builder.names, builder.report, "the first answer of an ensemble cancels the other calls")
    combines = _combines(builder, scope)
    combining = CombineBuilder(builder, scope)
    kept = _kept(scope, combines)
    read = {source for combine in kept for source in combine.sources}
    live = sorted(range(len(names)) if node.message.ensemble.quorum else {i for i, _ in read})
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
    sources = {(i, tensor): (live.index(i), slot) for (i, tensor), slot in slots.items()}
    types: dict[str, TensorType] = {}
    made: dict[str, CombinePlan] = {}
    for combine in combines:
        known = combining.combined_type(combine, [built[i].outputs[tensor] for i, tensor in combine.sources])
        if combine in kept:
            result, known = _made(combining, scope, combine, known, [sources[source] for source in combine.sources])
            if result is not None:
                made[combine.output] = result
        types[combine.output] = _present(scope, combine, known, built, len(live))
    for name, result in made.items():
        scope.note(result.output, name, types[name])
    plans = [plan for i in live if (plan := built[i].plan)]
    if len(plans) != len(live) or len(made) != len(kept):
        return None, types
    return Members(plans, made), types


def _made(
    combining: CombineBuilder, scope: Scope, combine: Combine, known: TensorType, sources: Sequence[tuple[int, int]]
) -> tuple[CombinePlan | None, TensorType]:
    """Plan of a combine, None where an error was reported, and type of the result."""
    slot = sources[0][1] if combine.method.is_keyed else scope.new_slot(combine.output)
    axis = combine.axis(known.dims)
    plan = CombinePlan(slot, combine.method, tuple(sources), combine.message.weighted, axis)
    return combining.custom(combine, plan, known) if combine.method.calls_model else (plan, known)


def _combines(builder: NodeBuilder, scope: Scope) -> list[Combine]:
    node, names = scope.node, scope.names
    found: list[Combine] = []
    lacking: set[tuple[int, str]] = set()
    for k, message in enumerate(node.message.ensemble.combine or [pb.Combine(method=pb.Combine.KEYED)]):
        path = f"{node.kind_path}.combine[{k}]"
        method, tensor = method_of(message), combined_tensor(message)
        if method.is_keyed:
            only = getattr(message, "from")
            outputs = list(keyed_outputs(node, names, only))
            found += [Combine(output, method, message, k, path, [(i, source)]) for output, i, source in outputs]
            if not outputs and only and not any(step.is_open for step in names.steps):
                given = [name for step in names.steps for name in step.outputs.values()]
                builder.missing_output(scope.file, f"{path}.from", f"no step gives '{only}'", only, given)
        elif message.output:
            combine = Combine(message.output, method, message, k, path, [])
            for i, step in enumerate(names.steps):
                if tensor in step.outputs.values():
                    combine.sources.append((i, tensor))
                elif not step.is_open and (i, tensor) not in lacking:
                    lacking.add((i, tensor))
                    text = f"step '{node.steps[i].name}' gives no '{tensor}', which {method.name} combines"
                    builder.missing_output(scope.file, target_path(node.steps[i]), text, tensor, step.outputs.values())
            found.append(combine)
    _check_members(builder, scope, found)
    return _distinct(builder, scope, found)


def _distinct(builder: NodeBuilder, scope: Scope, combines: Sequence[Combine]) -> list[Combine]:
    """The first of each output; a second one is reported, unless both name it in the file, which was."""
    first: dict[str, Combine] = {}
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
                text += f", by the 'combine' at {scope.file.place(before.path)}; leave one out"
            builder.report.error("G005", scope.file, combine.path, text)
    return list(first.values())


def _check_members(builder: NodeBuilder, scope: Scope, combines: Sequence[Combine]) -> None:
    if builder.report.has_errors:
        return
    read = {i for combine in combines for i, _ in combine.sources}
    for i, step in enumerate(scope.node.steps):
        if i not in read and combines and not scope.names.steps[i].is_open:
            has_quorum = scope.node.message.ensemble.quorum > 0
            what = "only counts for the quorum" if has_quorum else "never runs"
            text = f"step '{step.name}' {what}: no 'combine' reads its outputs"
            builder.report.warning("G026", scope.file, target_path(step), text)


def _kept(scope: Scope, combines: Sequence[Combine]) -> list[Combine]:
    """Combines whose output is read.

    All are kept where only those that take the first answer would be left, which made it a race.
    """
    useful = [combine for combine in combines if combine.sources]
    kept = [combine for combine in useful if combine.output in scope.call.wanted]
    is_race_now = all(combine.method.is_first for combine in kept)
    return useful if is_race_now and not is_race(scope.node) else kept


def _present(
    scope: Scope, combine: Combine, known: TensorType, built: Sequence[BuiltStep], num_steps: int
) -> TensorType:
    """The type of a combined tensor, which may be absent if every step that gives it may be missing.

    At least one of them is not if a HARD step always gives it, or if more answers are needed than the other steps have.
    What is merged lacks it if one step's answer may.
    """
    offers = [built[i].outputs[tensor] for i, tensor in combine.sources]
    optional = next((offer for offer in offers if offer.is_optional), None)
    if optional is None or any(step.is_open for step in scope.names.steps):
        return known
    if combine.method.is_merged:
        answers = (built[i].answered[tensor] for i, tensor in combine.sources)
        lacking = next((answer for answer in answers if answer.is_optional), None)
        return known if lacking is None else known.absent_like(lacking)
    has_hard = not all(offer.is_optional for offer in offers) and not is_race(scope.node)
    num_answering = sum(not built[i].answered[tensor].is_optional for i, tensor in combine.sources)
    needed = max(scope.node.message.ensemble.quorum, 1)
    return known if has_hard or num_answering + needed > num_steps else known.absent_like(optional)
