"""What an ensemble makes of the tensors of its steps: the type of the result, and the call of a model that combines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft_protos import graph_pb2 as pb
from weft_router.graph.compiler.names import MASK, combined_tensor, describe, target_path
from weft_router.graph.compiler.scope import Scope, declared_types, declaring
from weft_router.graph.compiler.steps import StepBuilder
from weft_router.graph.compiler.uses import declared_uses
from weft_router.graph.plan import Binding, CombineMethod, CombinePlan, StepPlan
from weft_router.graph.types.signatures import FLOATS, INTEGERS, TensorType, dims_fit, fits, merged, shape_text

_NUMBERS = (INTEGERS | FLOATS, "numbers")
_CLASSES = (INTEGERS | {"BYTES", "BOOL"}, "integers, strings or BOOL")
#: What labels are; 8 bits may be pixels.
_LABELS = INTEGERS - {"INT8", "UINT8"}
#: What to do with other tensors.
_OTHER_METHODS = {
    _NUMBERS[1]: "of strings and BOOL, take the one that most steps give: method: VOTE",
    _CLASSES[1]: "of other numbers, take method: AVERAGE or MEDIAN",
}
_DATATYPES = {
    CombineMethod.VOTE: _CLASSES,
    **dict.fromkeys(
        (CombineMethod.AVERAGE, CombineMethod.MEDIAN, CombineMethod.SUM, CombineMethod.MIN, CombineMethod.MAX), _NUMBERS
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Combine:
    """One output of an ensemble.

    Attributes:
        output: Its name.
        method: How it is made.
        message: What the file says.
        index: Of ``message`` in the file.
        path: Of ``message``, for positions.
        sources: (index of the step, its tensor) of every step that offers one.
    """

    output: str
    method: CombineMethod
    message: pb.Combine
    index: int
    path: str
    sources: list[tuple[int, str]]

    def axis(self, dims: Sequence[int]) -> int:
        """Axis of a CONCAT or STACK counted from the end of the result, so that a batch dimension changes nothing."""
        given = self.message.axis
        has_axis = self.method in (CombineMethod.CONCAT, CombineMethod.STACK)
        return given - len(dims) if has_axis and given >= 0 else given


class CombineBuilder(StepBuilder):
    """Compiles combines."""

    def combined_type(self, scope: Scope, combine: Combine, types: Sequence[TensorType]) -> TensorType:
        """Type of a combined tensor, of CUSTOM its stack; what cannot be combined is reported (G007, G008, G015).

        Args:
            scope: The ensemble.
            combine: How.
            types: Of ``combine.sources``. The result is certain to be there; whether it is, the caller knows.
        """
        place = scope.file.place(combine.path)
        origin = f"{combine.method.value} of node '{scope.node.name}' ({place})"
        known = [one for one in types if one.is_known]
        if not known:
            return TensorType.unknown(origin)
        if combine.method is CombineMethod.KEYED:
            return types[0].present()
        if not (self._is_allowed(scope, combine, known) and self._agree(scope, combine, known)):
            return TensorType.unknown(origin)
        result = merged(known, origin).present()
        is_complete = len(known) == len(types) and not any(one.is_optional for one in types)
        axis = combine.axis(result.dims)
        if combine.method is CombineMethod.CONCAT:
            sizes = [one.dims[axis] for one in known]
            dims = list(result.dims)
            dims[axis] = sum(sizes) if is_complete and -1 not in sizes else -1
            return replace(result, dims=tuple(dims))
        if combine.method is CombineMethod.STACK:
            return _stacked(scope, combine, result, len(types) if is_complete else -1)
        if combine.method is CombineMethod.CUSTOM:
            return replace(result, dims=(len(types), *result.dims))
        return result

    def _is_allowed(self, scope: Scope, combine: Combine, known: Sequence[TensorType]) -> bool:
        """Whether the method takes such tensors, and has such an axis."""
        method, path, first = combine.method, combine.path, known[0]
        allowed, words = _DATATYPES.get(method, (frozenset[str](), ""))
        wrong = next((one for one in known if words and one.datatype not in allowed), None)
        if wrong is not None:
            text = f"{method.value} takes {words}; it gets {wrong} from {wrong.origin}; {_OTHER_METHODS[words]}"
            self.report.error("G015", scope.file, f"{path}.method", text)
            return False
        if method is CombineMethod.AVERAGE and first.datatype in _LABELS:
            text = f"AVERAGE of {first.datatype} gives whole numbers; of labels, take the one that most steps give: "
            self.report.warning("G015", scope.file, f"{path}.method", f"{text}method: VOTE")
        rank = len(first.dims) + (method is CombineMethod.STACK)
        axis, has_axis = combine.message.axis, method in (CombineMethod.CONCAT, CombineMethod.STACK)
        if has_axis and not -rank <= axis < rank:
            text = (
                f"axis {axis} is not an axis of the result, which has {rank} of them beside the batch dimension; give "
                f"{-rank} to {rank - 1}"
            )
            self.report.error("G008", scope.file, f"{path}.axis", text)
            return False
        if method is CombineMethod.CUSTOM and scope.file.is_batched and not first.is_batched:
            text = f"CUSTOM needs tensors with a batch dimension; it gets {first} from {first.origin}"
            self.report.error("G008", scope.file, path, text)
            return False
        return True

    def _agree(self, scope: Scope, combine: Combine, known: Sequence[TensorType]) -> bool:
        """Whether the tensors agree in datatype and shape, for CONCAT beside its axis."""
        first = known[0]
        for other in known[1:]:
            if combine.method is CombineMethod.CONCAT:
                is_fit = _fits_beside(first, other, combine.axis(first.dims))
            else:
                is_fit = fits(first, other)
            if other.datatype != first.datatype or not is_fit:
                code = "G007" if other.datatype != first.datatype else "G008"
                text = (
                    f"{combine.method.value} needs tensors that agree; it gets {first} from {first.origin}, and "
                    f"{other} from {other.origin}"
                )
                self.report.error(code, scope.file, combine.path, text)
                return False
        return True

    def custom(
        self, scope: Scope, combine: Combine, plan: CombinePlan, stacked: TensorType
    ) -> tuple[CombinePlan | None, TensorType]:
        """The plan of a CUSTOM with its call and two more slots, and the type of what the model gives.

        Args:
            scope: The ensemble.
            combine: The CUSTOM.
            plan: All but the call and its slots.
            stacked: Type of the stack.

        Returns:
            None for the plan where an error was reported.
        """
        step, names = scope.node.customs.get(combine.index), scope.names.customs.get(combine.index)
        if step is None or names is None:  # reported already
            return None, TensorType.unknown("a CUSTOM without a model")
        file, tensor, path = scope.file, combined_tensor(combine.message), target_path(step)
        target, uses = self.names.of_target(names.target), declared_uses(names, is_batched=file.is_batched)
        sources = {name: step.message.input_map.get(name, name) for name in target.inputs}
        if tensor not in sources.values() and not target.is_open:
            text = (
                f"no input of {describe(names.target)} is named '{tensor}', the tensor that CUSTOM combines; name one: "
                f'input_map {{ key: "{next(iter(target.inputs), "")}" value: "{tensor}" }}'
            )
            self.report.error("G006", file, path, text)
            return None, TensorType.unknown("a CUSTOM")
        mask = TensorType("BOOL", stacked.dims[:1], stacked.is_batched, is_optional=False, origin="CUSTOM, its mask")
        slots: dict[str, int] = {}
        made = [(tensor, stacked)] + [(MASK, mask)] * (MASK in sources.values())
        for name, known in made:
            slots[name] = scope.new_slot(f"{combine.output}.{name}", known)
        inputs: list[Binding] = []
        for name, source in sources.items():
            if source in slots:
                inputs.append(Binding(name, slots[source]))
                what = f"input '{name}' of {describe(names.target)}"
                known = mask if source == MASK and source != tensor else stacked
                if stacked.is_known and name in uses:
                    self.check_use(file, path, known, uses[name], is_required=False, what=what)
        built = self.stand_alone(scope, step, names, {combine.output: plan.output})
        given = built.answered.get(combine.output)
        if given is None and not target.is_open:
            first = next(iter(names.outputs), "")
            text = (
                f"{describe(names.target)} gives no '{combine.output}', the output of the CUSTOM; map one: "
                f'output_map {{ key: "{first}" value: "{combine.output}" }}'
            )
            self.report.error("G017", file, path, text)
        known = given or TensorType.unknown("a CUSTOM")
        if built.plan is None or given is None:
            return None, known
        call: StepPlan = replace(built.plan, inputs=(*built.plan.inputs, *inputs))
        return replace(plan, custom=call, stack=slots[tensor], mask=slots.get(MASK, -1)), known


def _stacked(scope: Scope, combine: Combine, one: TensorType, num_tensors: int) -> TensorType:
    """Type of a stack of tensors like ``one``, its origin with the axis that would make what the node declares."""
    rank = len(one.dims) + 1
    given = combine.axis([*one.dims, num_tensors]) % rank
    types = [replace(one, dims=(*one.dims[:axis], num_tensors, *one.dims[axis:])) for axis in range(rank)]
    promised = declared_types(scope.file, scope.node, declaring(scope.file, scope.node).output).get(combine.output)
    fitting = [axis for axis, known in enumerate(types) if promised and fits(known, promised)]
    if not fitting or given in fitting:
        return types[given]
    why = ": the batch dimension is not counted" * one.is_batched
    cure = f"; 'axis: {fitting[0]}' gives {shape_text(types[fitting[0]].full_dims)}{why}"
    return replace(types[given], origin=one.origin + cure)


def _fits_beside(left: TensorType, right: TensorType, axis: int) -> bool:
    """Whether two tensors can stand side by side along ``axis``."""
    if len(left.dims) != len(right.dims):
        return False
    free = list(right.dims)
    free[axis] = left.dims[axis]
    return dims_fit(left.dims, tuple(free))
