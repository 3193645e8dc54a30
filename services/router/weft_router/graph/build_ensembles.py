"""From an ensemble to its plan: every step's answers get slots of their own, a combine makes one tensor of several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft_common.pbtxt import suggestion
from weft_protos import graph_pb2 as pb
from weft_router.graph.build_steps import StepBuilder
from weft_router.graph.names import combines_of, keyed_outputs, target_path
from weft_router.graph.parse import GraphFile
from weft_router.graph.plan import Binding, CombineMethod, CombinePlan, NodeKind, NodePlan
from weft_router.graph.scope import BuiltStep, Scope
from weft_router.graph.types import FLOATS, INTEGERS, TensorType, dims_fit, fits, merged, shape_text

_METHODS = {pb.Combine.Method.Value(method.value): method for method in CombineMethod}
_DATATYPES = {
    CombineMethod.VOTE: (INTEGERS | {"BYTES", "BOOL"}, "integers, strings or BOOL"),
    CombineMethod.AVERAGE: (INTEGERS | FLOATS, "numbers"),
}


@dataclass(slots=True)
class _Combine:
    """One output of the ensemble; ``sources`` are (index of the step, tensor)."""

    output: str
    method: CombineMethod
    message: pb.Combine
    path: str
    sources: list[tuple[int, str]]


class CombineBuilder(StepBuilder):
    """Compiles ensembles."""

    def ensemble(self, scope: Scope) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """Plan of an ensemble, and types of its outputs."""
        names, wanted = scope.names.steps, scope.call.wanted
        combines = self._combines(scope)
        read = {source for combine in combines if combine.output in wanted for source in combine.sources}
        slots: dict[tuple[int, str], int] = {}
        built: list[BuiltStep] = []
        for i, step in enumerate(names):
            kept = {name: tensor for name, tensor in step.outputs.items() if (i, tensor) in read}
            built.append(self.step(scope, i, frozenset(kept)))
            for name, tensor in kept.items():
                slots.setdefault((i, tensor), len(scope.inputs) + len(slots))
                scope.note(slots[i, tensor], f"{scope.node.steps[i].name}.{tensor}", built[i].outputs[name])
        types = {c.output: self._type(scope, c, [_offered(scope, built, i, t) for i, t in c.sources]) for c in combines}
        live = sorted({i for i, _ in read})
        plans = [
            replace(
                plan,
                outputs=tuple(Binding(n, slots[i, t]) for n, t in names[i].outputs.items() if (i, t) in slots),
            )
            for i in live
            if (plan := built[i].plan)
        ]
        if len(plans) != len(live):
            return None, types
        position = {i: k for k, i in enumerate(live)}
        num_slots = len(scope.inputs) + len(slots)
        made: list[CombinePlan] = []
        for combine in combines:
            if combine.output not in wanted or not combine.sources:
                continue
            sources = tuple((position[source[0]], slots[source]) for source in combine.sources)
            slot = sources[0][1]
            if combine.method is not CombineMethod.KEYED:
                slot, num_slots = num_slots, num_slots + 1
                scope.note(slot, combine.output, types[combine.output])
            axis = self._axis(combine, types[combine.output])
            made.append(CombinePlan(slot, combine.method, sources, combine.message.weighted, axis))
        outputs = [combine.output for combine in combines if combine.output in wanted and combine.sources]
        node_plan = NodePlan(
            name=scope.node.name,
            path=scope.call.path,
            kind=NodeKind.ENSEMBLE,
            num_slots=num_slots,
            inputs=tuple(Binding(name, slot) for slot, name in enumerate(scope.inputs)),
            outputs=tuple(Binding(name, combine.output) for name, combine in zip(outputs, made, strict=True)),
            steps=tuple(plans),
            combines=tuple(made),
        )
        return node_plan, types

    def missing_output(self, file: GraphFile, path: str, text: str, name: str, given: Iterable[str]) -> None:
        """Report an output that is not given, with the name that was probably meant."""
        self.report.error("G017", file, path, text + suggestion(name, given))

    def _combines(self, scope: Scope) -> list[_Combine]:
        """Combines with their sources; steps that lack one are reported."""
        node, names = scope.node, scope.names
        found: list[_Combine] = []
        for k, message in enumerate(combines_of(node)):
            path = f"{node.kind_path}.combine[{k}]"
            method, tensor = _METHODS.get(message.method), getattr(message, "from") or message.output
            if method is CombineMethod.KEYED:
                for output, i, source in keyed_outputs(node, names, getattr(message, "from")):
                    found.append(_Combine(output, method, message, path, [(i, source)]))
            elif method is not None:
                combine = _Combine(message.output, method, message, path, [])
                for i, step in enumerate(names.steps):
                    if tensor in step.outputs.values():
                        combine.sources.append((i, tensor))
                    elif not step.is_open:
                        text = f"step '{node.steps[i].name}' gives no '{tensor}', which {method.value} combines"
                        given = step.outputs.values()
                        self.missing_output(scope.file, target_path(node.steps[i]), text, tensor, given)
                found.append(combine)
        self._check_members(scope, found)
        return found

    def _check_members(self, scope: Scope, combines: Sequence[_Combine]) -> None:
        if self.report.has_errors:
            return
        read = {i for combine in combines for i, _ in combine.sources}
        for i, step in enumerate(scope.node.steps):
            if i not in read and combines and not scope.names.steps[i].is_open:
                text = f"step '{step.name}' never runs: no 'combine' reads its outputs"
                self.report.warning("G026", scope.file, target_path(step), text)

    def _type(self, scope: Scope, combine: _Combine, types: list[TensorType]) -> TensorType:
        """Type of a combined tensor; sources that cannot be combined are reported (G007, G008, G015)."""
        file, path = scope.file, combine.path
        origin = f"{combine.method.value} of node '{scope.node.name}' ({file.place(path)})"
        known = [one for one in types if one.is_known]
        if not known:
            return TensorType.unknown(origin)
        if combine.method is CombineMethod.KEYED:
            return types[0]
        first = known[0]
        allowed, words = _DATATYPES.get(combine.method, ({first.datatype}, ""))
        axis = self._axis(combine, first)
        if combine.method is CombineMethod.CONCAT and not -len(first.dims) <= axis < 0:
            text = f"axis {combine.message.axis} is not an axis of {shape_text(first.dims)}"
            self.report.error("G008", file, f"{path}.axis", text)
            return TensorType.unknown(origin)
        for other in known:
            if other.datatype not in allowed and words:
                text = f"{combine.method.value} takes {words}; it gets {other} from {other.origin}"
                self.report.error("G015", file, f"{path}.method", text)
                return TensorType.unknown(origin)
            is_fit = _fits_beside(first, other, axis) if combine.method is CombineMethod.CONCAT else fits(first, other)
            if other.datatype != first.datatype or not is_fit:
                code = "G007" if other.datatype != first.datatype else "G008"
                text = (
                    f"{combine.method.value} needs tensors that agree; it gets {first} from {first.origin}, and "
                    f"{other} from {other.origin}"
                )
                self.report.error(code, file, path, text)
                return TensorType.unknown(origin)
        result = merged(known, origin)
        if combine.method is CombineMethod.CONCAT:
            sizes = [one.dims[axis] for one in known]
            dims = list(result.dims)
            dims[axis] = -1 if -1 in sizes or len(known) < len(types) else sum(sizes)
            result = replace(result, dims=tuple(dims))
        return result

    def _axis(self, combine: _Combine, known: TensorType) -> int:
        """Axis of a CONCAT counted from the end, so that a batch dimension makes no difference."""
        axis = combine.message.axis
        return axis if axis < 0 or combine.method is not CombineMethod.CONCAT else axis - len(known.dims)


def _offered(scope: Scope, built: Sequence[BuiltStep], index: int, tensor: str) -> TensorType:
    outputs = scope.names.steps[index].outputs
    return next(built[index].outputs[name] for name, mapped in outputs.items() if mapped == tensor)


def _fits_beside(left: TensorType, right: TensorType, axis: int) -> bool:
    """Whether two tensors can stand side by side along ``axis``."""
    if len(left.dims) != len(right.dims):
        return False
    free = list(right.dims)
    free[axis] = left.dims[axis]
    return dims_fit(left.dims, tuple(free))
