"""From a sequence to its plan: steps in the order of their data, those that nothing reads left out, and the loop."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.names import target_path
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import BuiltStep, Scope, owner_text
from weft.language.compiler.uses import visible_outputs
from weft.language.plan import StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.signatures import TensorType
from weft.router.operators.sequence.run import LoopPlan
from weft.router.operators.sequence.streams import StreamStep, check_one_response, check_streams

_WHILE = Purpose("while")


def build_pipeline(
    builder: NodeBuilder, scope: Scope
) -> tuple[list[StepPlan] | None, LoopPlan | None, dict[str, TensorType]]:
    """Steps of a sequence, None where an error was reported; its loop; and types of what it could give."""
    steps = range(len(scope.names.steps))
    order = _order(builder, scope, _waits(scope, steps))
    if order is None:
        return None, None, {name: TensorType.unknown("a cycle") for name in scope.names.outputs}
    after = follows(scope, steps)
    live, slots = _allocate(scope, order, after)
    whole = scope.names.indexes_of(scope.node, scope.node.message.sequence.answer_after)
    whole = whole.union(*(after[i] | scope.names.steps[i].asks for i in live))
    built = {i: _compiled(builder, scope, i, slots.get(i), is_whole=i in whole) for i in order}
    _check_unread(builder, scope, live_steps(scope, order, {*_read_by_node(scope), *scope.names.outputs}, after))
    loop = _loop(builder, scope)
    if scope.streaming:
        _check_streams(builder, scope, order)
    elif not any(step.is_open for step in scope.names.steps):
        check_one_response(scope.file, scope.node, builder.report)
    known = {**scope.inputs, **scope.produced}
    outputs = {name: known[name] for name in scope.names.outputs if name in known}
    plans = {i: plan for i in steps if i in live and (plan := built[i].plan)}
    if len(plans) != len(live):
        return None, loop, outputs
    return _linked(scope, plans, _waits(scope, list(plans))), loop, outputs


def _compiled(
    builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int] | None, *, is_whole: bool
) -> BuiltStep:
    built = builder.step(scope, index, slots or {}, is_whole=is_whole)
    if slots is None:
        scope.streaming.pop(index, None)
    scope.produced |= built.outputs
    scope.answered |= built.answered
    for tensor, slot in (slots or {}).items():
        scope.given_slots[tensor] = slot
        scope.note(slot, tensor, built.outputs[tensor])
    return built


def _order(builder: NodeBuilder, scope: Scope, waits: dict[int, set[int]]) -> list[int] | None:
    """Steps, each after those that it waits for, else as declared; None, and a report, if they wait in a ring."""
    done: dict[int, None] = {}
    while waits:
        ready = next((i for i, producers in waits.items() if producers <= done.keys()), None)
        if ready is None:
            _report_ring(builder, scope, waits)
            return None
        done[ready] = None
        del waits[ready]
    return list(done)


def _report_ring(builder: NodeBuilder, scope: Scope, waits: Mapping[int, set[int]]) -> None:
    trail = [min(waits)]
    while trail.count(trail[-1]) == 1:
        trail.append(min(producer for producer in waits[trail[-1]] if producer in waits))
    circle = trail[trail.index(trail[-1]) :][::-1]
    steps = scope.node.steps
    shown = " -> ".join(steps[i].name for i in circle)
    reason = "each step waits for an output of the one before it"
    by_after = [steps[i].name for before, i in pairwise(circle) if before in scope.names.steps[i].follows]
    if scope.node.message.sequence.ordered:
        reason += ", or for its turn, since the sequence is 'ordered'; put the steps in the order of their data"
    elif by_after:
        named = " and ".join(f"'{name}'" for name in by_after)
        reason = f"each step waits for the one before it, {named} by 'after'; leave one out"
    else:
        reason += "; let one of them read another tensor"
    text = f"cycle: {shown}; {reason}"
    if len(circle) == 2:
        itself = "waits for an output of its own; let it read another tensor"
        text = f"cycle: {shown}; the step {'is after itself; leave that out' if by_after else itself}"
    builder.report.error("G003", scope.file, target_path(steps[circle[0]]), text)


def _check_unread(builder: NodeBuilder, scope: Scope, live: Set[int]) -> None:
    """Where all must be read, tensors that nothing reads are errors; elsewhere a step with no others is warned of.

    Args:
        live: Steps that run where every output of the node is read.
    """
    file, node, names = scope.file, scope.node, scope.names
    if any(step.is_open for step in names.steps):
        return
    read_from = {producer for step in names.steps for producer in step.reads.values()}
    for i, (step, step_names) in enumerate(zip(node.steps, names.steps, strict=True)):
        unread = [(name, tensor) for name, tensor in step_names.outputs.items() if not names.is_used(tensor)]
        if file.dialect.must_read_all:
            for name, tensor in unread:
                text = f"ensemble tensor '{tensor}' is unused in {file.title}"
                builder.report.error("G026", file, f"{step.path}.output_map[{name}]", text)
        elif i not in live and i not in read_from and not builder.report.has_errors:
            text = (
                f"step '{step.name}' never runs: nothing reads its outputs; if it is a guard, let the steps that it "
                f'guards say after: "{step.name}", or the sequence answer_after: "{step.name}"'
            )
            builder.report.warning("G026", file, target_path(step), text)


def _loop(builder: NodeBuilder, scope: Scope) -> LoopPlan | None:
    file, node = scope.file, scope.node
    message, path = node.message.sequence.loop, f"{node.kind_path}.loop"
    if not node.message.sequence.HasField("loop"):
        return None
    if not message.max_iterations:
        text = f"the loop of '{node.name}' has no bound; give it one, for example max_iterations: 10"
        builder.report.error("G020", file, path, text)
    if not getattr(message, "while"):
        text = (
            f"the loop of '{node.name}' has no 'while', the test that says whether to go round once more, for "
            "example while: 'max(outputs.PROBS) < 0.9'"
        )
        builder.report.error("G020", file, path, text)
    test = f"{path}.while"
    bindings = visible_outputs(scope, test, scope.produced, scope.given_slots)
    again = builder.condition(scope, test, _WHILE, outputs=bindings)
    carry = _carry(builder, scope, message.carry, f"{path}.carry")
    return LoopPlan(again, message.max_iterations, carry) if again is not None else None


def _carry(builder: NodeBuilder, scope: Scope, carried: Mapping[str, str], path: str) -> tuple[tuple[int, int], ...]:
    file, node = scope.file, scope.node
    is_open = any(step.is_open for step in scope.names.steps)
    again = scope.names.conditions.get(f"{node.kind_path}.loop.while")
    sure = again.expression.narrowed_outputs if again is not None else set()
    pairs: dict[str, tuple[int, int]] = {}
    for output, target in sorted(carried.items()):
        where = f"{path}[{output}]"
        produced, used = scope.produced.get(output), scope.inputs.get(target)
        if used is None and not is_open:
            text = f"{owner_text(file, node)} has no input '{target}'{suggestion(target, scope.inputs)}"
            builder.report.error("G006", file, where, text)
        if produced is None and not is_open:
            text = f"no step of '{node.name}' gives '{output}'{suggestion(output, scope.produced)}"
            builder.report.error("G006", file, f"{where}.key", text)
        if target in pairs:
            builder.report.error("G005", file, where, f"input '{target}' of the next round is carried twice")
        if produced is not None and used is not None:
            what = f"input '{target}' of the next round"
            produced = produced.present() if output in sure else produced
            builder.check_use(file, where, produced, used, is_required=not used.is_optional, what=what)
            pairs[target] = (scope.given_slots[output], scope.slots[target])
    return tuple(pairs.values())


def _check_streams(builder: NodeBuilder, scope: Scope, order: list[int]) -> None:
    names, waits = scope.names, _waits(scope, range(len(scope.names.steps)))
    steps = [
        StreamStep(
            definition,
            is_streaming=i in scope.streaming,
            producers=waits[i],
            reads_input=None in step.reads.values(),
        )
        for i, (definition, step) in enumerate(zip(scope.node.steps, names.steps, strict=True))
    ]
    wanted = [name for name in names.outputs if name in scope.call.wanted]
    outputs = {name: names.producers[name][-1] for name in wanted if name in names.producers}
    check_streams(scope.file, scope.node, order, steps, outputs, builder.report)


def _waits(scope: Scope, indexes: Sequence[int]) -> dict[int, set[int]]:
    after = follows(scope, indexes)
    return {i: scope.names.steps[i].waits_for | after[i] for i in indexes}


def _read_by_node(scope: Scope) -> set[str]:
    read = set(scope.node.message.sequence.loop.carry)
    again = scope.names.conditions.get(f"{scope.node.kind_path}.loop.while")
    if again is not None:
        read.update(ref.name for ref in again.expression.references if ref.space == "outputs")
    return read


def _allocate(
    scope: Scope, order: Sequence[int], after: Mapping[int, Set[int]]
) -> tuple[set[int], dict[int, dict[str, int]]]:
    names = scope.names.steps
    read = {*scope.call.wanted, *_read_by_node(scope)}
    live = live_steps(scope, order, read, after)
    read.update(tensor for i in live for tensor, producer in names[i].reads.items() if producer is not None)
    slots = {
        i: {tensor: scope.new_slot(tensor) for tensor in dict.fromkeys(names[i].outputs.values()) if tensor in read}
        for i in sorted(live)
    }
    scope.new_ok_slots({asked for i in live for asked in names[i].asks})
    return live, slots


def _linked(scope: Scope, plans: Mapping[int, StepPlan], waits: Mapping[int, Set[int]]) -> list[StepPlan]:
    awaited = scope.names.indexes_of(scope.node, scope.node.message.sequence.answer_after)
    after = follows(scope, list(plans))
    position = {i: place for place, i in enumerate(plans)}
    consumers: dict[int, list[int]] = {i: [] for i in plans}
    for i in plans:
        for producer in waits[i]:
            consumers[producer].append(position[i])
    return [
        replace(
            plan,
            consumers=tuple(consumers[i]),
            num_dependencies=len(waits[i]),
            after=tuple(sorted(position[other] for other in after[i])),
            is_awaited=i in awaited,
        )
        for i, plan in plans.items()
    ]


def check_followed(file: GraphFile, node: NodeDefinition, names: Sequence[str], path: str, report: GraphReport) -> None:
    """Report names in ``after`` or ``answer_after`` that no step of the sequence has, or nobody can wait for (G036)."""
    field = path.rpartition(".")[2]
    steps = {step.name: step for step in reversed(node.steps)}
    others = [name for name, step in steps.items() if not step.is_shadow and not path.startswith(f"{step.path}.")]
    seen: set[str] = set()
    for i, name in enumerate(names):
        text = ""
        if name not in steps:
            text = f"'{node.name}' has no step '{name}', which '{field}' names{suggestion(name, others)}"
        elif steps[name].is_shadow:
            text = f"step '{name}' is a shadow, for which nobody waits; leave it out"
        elif name in seen:
            text = f"'{field}' has step '{name}' already; leave one out"
        seen.add(name)
        if text:
            report.error("G036", file, f"{path}[{i}]", text)


def follows(scope: Scope, steps: Sequence[int]) -> dict[int, Set[int]]:
    """For each of some steps of a sequence, ascending, those of them that it is after.

    In an ordered sequence each is after the one before it; shadows are passed over, for which nobody waits.
    """
    if not scope.node.message.sequence.ordered:
        return {i: scope.names.steps[i].follows for i in steps}
    found: dict[int, Set[int]] = {}
    before: Set[int] = set()
    for i in steps:
        found[i] = before
        before = before if scope.node.steps[i].is_shadow else {i}
    return found


def live_steps(scope: Scope, order: Sequence[int], read: Set[str], after: Mapping[int, Set[int]]) -> set[int]:
    """Steps that must run, shadows among them.

    Args:
        order: Of its steps, each after those that it waits for.
        read: Tensors that a caller or the node itself reads, as the last steps give them.
        after: As ``follows`` gives it.
    """
    names, sequence = scope.names.steps, scope.node.message.sequence
    needed = {(tensor, scope.names.last(tensor)) for tensor in read}
    live = set(scope.names.indexes_of(scope.node, sequence.answer_after))
    for i in reversed(order):
        is_needed = any((tensor, i) in needed for tensor in names[i].outputs.values())
        if i in live or scope.node.steps[i].is_shadow or is_needed:
            live |= {i, *names[i].asks, *after[i]}
            needed.update(names[i].reads.items())
    return live
