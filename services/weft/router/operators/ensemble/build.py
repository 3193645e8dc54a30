"""From an ensemble to its plan: every step's answers get slots of their own, a combine makes one tensor of several."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.language.compiler.names import target_path
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import BuiltStep, Scope
from weft.language.compiler.state import check_rows
from weft.language.plan import StepPlan
from weft.language.types.signatures import TensorType
from weft.router.operators.ensemble.combines import Combine, CombineBuilder
from weft.router.operators.ensemble.messages import combined_tensor, is_race, keyed_outputs, method_of
from weft.router.operators.ensemble.run import CombinePlan
from weft_protos import graph_pb2 as pb


class Members(NamedTuple):
    """The compiled parts of an ensemble.

    Attributes:
        steps: Those that run.
        combines: By output.
    """

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
    """Plan of a combine, None where an error was reported, and type of the result.

    Args:
        combining: Compiles it.
        scope: The ensemble.
        combine: What is combined.
        known: Type of the combined tensor; where a model combines, of the stack that it gets.
        sources: As in the plan.
    """
    slot = sources[0][1] if combine.method.is_keyed else scope.new_slot(combine.output)
    axis = combine.axis(known.dims)
    plan = CombinePlan(slot, combine.method, tuple(sources), combine.message.weighted, axis)
    return combining.custom(combine, plan, known) if combine.method.calls_model else (plan, known)


def _combines(builder: NodeBuilder, scope: Scope) -> list[Combine]:
    """Combines with their sources; steps that lack one are reported."""
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
    return _told_apart(builder, scope, found)


def _told_apart(builder: NodeBuilder, scope: Scope, combines: Sequence[Combine]) -> list[Combine]:
    """The first of each output; a second one is reported, unless both name it in the file, which was."""
    first: dict[str, Combine] = {}
    told: set[str] = set()
    for combine in combines:
        before = first.setdefault(combine.output, combine)
        is_second = before is not combine and (before.method.is_keyed or combine.method.is_keyed)
        if is_second and combine.path not in told:
            told.add(combine.path)
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
