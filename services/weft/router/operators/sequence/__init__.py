"""The sequence: a pipeline whose steps see one another's outputs; it may run in a loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from typing_extensions import override

from weft.base.text.pbtxt import suggestion
from weft.language.checks.fields import check_choices
from weft.language.compiler.names import NodeNames, target_path
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import BuiltStep, Scope, declaring, owner_text
from weft.language.compiler.uses import visible_outputs
from weft.language.plan import NodePlan, StepPlan
from weft.language.pruning import reached
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.signatures import TensorType
from weft.router.operators.sequence.run import LoopPlan, SequencePlan
from weft_protos import graph_pb2 as pb

__all__ = ["LoopPlan", "SequenceKind", "SequencePlan"]


class SequenceKind(NodeKind):
    """The sequence in graph files: fields, checks, compilation."""

    plan = SequencePlan
    step_fields = frozenset({"after"})
    sees_answers = True

    @override
    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        return [("loop.while", getattr(message.sequence.loop, "while"))]

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        return set(node.message.sequence.loop.carry)

    @override
    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        return {output for output, target in node.message.sequence.loop.carry.items() if target in needed}

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """Outputs of steps that no other step reads."""
        read = {read for step in names.steps for read in step.reads.items()}
        yield from (tensor for tensor in names.producers if (tensor, names.last(tensor)) not in read)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """Any step may stream; the checks of streams reject loops."""
        return ""

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """Compile a sequence; steps that nothing reads are left out."""
        names, message = scope.names.steps, scope.node.message.sequence
        after = _follows(scope, range(len(names)))
        waits = {i: names[i].waits_for | after[i] for i in range(len(names))}
        order = _order(builder, scope, waits)
        if order is None:
            return None, {name: TensorType.unknown("a cycle") for name in scope.names.outputs}
        live, slots = _allocate(scope, order, after)
        whole = scope.names.indexes_of(scope.node, message.answer_after)
        whole = whole.union(*(after[i] | names[i].asks for i in live))
        built = {i: _compiled(builder, scope, i, slots.get(i), is_whole=i in whole) for i in order}
        _check_unread(builder, scope, _live_steps(scope, order, {*_read_by_node(scope), *scope.names.outputs}, after))
        loop = _loop(builder, scope)
        if scope.streaming:
            _check_streams(builder.report, scope, order, waits)
        elif not any(step.is_open for step in names):
            _check_one_response(builder.report, scope)
        known = {**scope.inputs, **scope.produced}
        outputs = {name: known[name] for name in scope.names.outputs if name in known}
        plans = {i: plan for i in range(len(names)) if i in live and (plan := built[i].plan)}
        if len(plans) != len(live):
            return None, outputs
        node = scope.node_plan(SequencePlan, _linked(scope, plans), {**scope.slots, **scope.given_slots})
        limit = message.max_inflight_responses if scope.streaming else 0
        return replace(node, loop=loop, max_inflight_responses=limit), outputs

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        for step in node.steps:
            check_followed(file, node, step.message.after, f"{step.path}.after", report)
        check_followed(file, node, node.message.sequence.answer_after, f"{node.kind_path}.answer_after", report)

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        sequence = node.message.sequence
        check_choices(file, node, [("ordered", sequence.ordered)], report)
        for step in node.steps if sequence.ordered else ():
            why = "in an 'ordered' sequence, where each step waits for the one before it"
            report.refuse(file, step.path, [("after", len(step.message.after) > 0)], why)


_WHILE = Purpose("while")
#: Label of a tensor that exists once for each request.
_ONCE = -1


def _compiled(
    builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int] | None, *, is_whole: bool
) -> BuiltStep:
    """Compile one step, with slots if it is live; later steps can read its outputs."""
    built = builder.step(scope, index, slots or {}, is_whole=is_whole)
    if slots is None:
        scope.streaming.pop(index, None)
    scope.produced |= built.outputs
    scope.answered |= built.answered
    for tensor, slot in (slots or {}).items():
        scope.given_slots[tensor] = slot
        scope.note(slot, tensor, built.outputs[tensor])
    return built


def _order(builder: NodeBuilder, scope: Scope, waits: Mapping[int, Set[int]]) -> list[int] | None:
    """Steps in topological order, else as declared; None, and a report, for a cycle."""
    done: dict[int, None] = {}
    waiting = dict(waits)
    while waiting:
        ready = next((i for i, producers in waiting.items() if producers <= done.keys()), None)
        if ready is None:
            _report_ring(builder, scope, waiting)
            return None
        done[ready] = None
        del waiting[ready]
    return list(done)


def _report_ring(builder: NodeBuilder, scope: Scope, waits: Mapping[int, Set[int]]) -> None:
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
    if len(circle) == 2:
        itself = "waits for an output of its own; let it read another tensor"
        reason = f"the step {'is after itself; leave that out' if by_after else itself}"
    builder.report.error("G003", scope.file, target_path(steps[circle[0]]), f"cycle: {shown}; {reason}")


def _check_unread(builder: NodeBuilder, scope: Scope, live: Set[int]) -> None:
    """Report unread tensors if all must be read; else warn of steps with only unread ones."""
    file, node, names = scope.file, scope.node, scope.names
    if any(step.is_open for step in names.steps):
        return
    read_from = {producer for step in names.steps for producer in step.reads.values()}
    for i, (step, step_names) in enumerate(zip(node.steps, names.steps, strict=True)):
        if file.dialect.must_read_all:
            for name, tensor in step_names.outputs.items():
                if not names.is_used(tensor):
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
    """(output slot, input slot) for each tensor that the loop carries over; reports misfits."""
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


def _read_by_node(scope: Scope) -> set[str]:
    """Outputs of steps that the loop carries over or tests."""
    read = set(scope.node.message.sequence.loop.carry)
    again = scope.names.conditions.get(f"{scope.node.kind_path}.loop.while")
    if again is not None:
        read.update(ref.name for ref in again.expression.references if ref.space == "outputs")
    return read


def _allocate(
    scope: Scope, order: Sequence[int], after: Mapping[int, Set[int]]
) -> tuple[set[int], dict[int, dict[str, int]]]:
    """Steps that must run, shadows included, and per step the slots read by them, a caller or the loop."""
    names = scope.names.steps
    read = {*scope.call.wanted, *_read_by_node(scope)}
    live = _live_steps(scope, order, read, after)
    read.update(tensor for i in live for tensor, producer in names[i].reads.items() if producer is not None)
    slots = {
        i: {tensor: scope.new_slot(tensor) for tensor in dict.fromkeys(names[i].outputs.values()) if tensor in read}
        for i in sorted(live)
    }
    scope.new_ok_slots({asked for i in live for asked in names[i].asks})
    return live, slots


def _linked(scope: Scope, plans: Mapping[int, StepPlan]) -> list[StepPlan]:
    """Link each plan with the plans that it waits for."""
    awaited = scope.names.indexes_of(scope.node, scope.node.message.sequence.answer_after)
    after = _follows(scope, list(plans))
    position = {i: place for place, i in enumerate(plans)}
    consumers: dict[int, list[int]] = {i: [] for i in plans}
    waits = {i: scope.names.steps[i].waits_for | after[i] for i in plans}
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
    """Report names in ``after`` or ``answer_after`` that are no steps of the sequence or cannot be awaited (G036)."""
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


def _follows(scope: Scope, steps: Sequence[int]) -> dict[int, Set[int]]:
    """For each of some steps of a sequence, ascending, the ones among them that it runs after.

    In an ordered sequence each runs after the previous one, ignoring shadows, which nothing waits for.
    """
    if not scope.node.message.sequence.ordered:
        return {i: scope.names.steps[i].follows for i in steps}
    found: dict[int, Set[int]] = {}
    before: Set[int] = set()
    for i in steps:
        found[i] = before
        before = before if scope.node.steps[i].is_shadow else {i}
    return found


def _live_steps(scope: Scope, order: Sequence[int], read: Set[str], after: Mapping[int, Set[int]]) -> set[int]:
    """Steps that must run, shadows included, if a caller or the node reads the tensors ``read``."""
    names, sequence = scope.names.steps, scope.node.message.sequence
    needed = {(tensor, scope.names.last(tensor)) for tensor in read}
    live = set(scope.names.indexes_of(scope.node, sequence.answer_after))
    for i in reversed(order):
        is_needed = any((tensor, i) in needed for tensor in names[i].outputs.values())
        if i in live or scope.node.steps[i].is_shadow or is_needed:
            live |= {i, *names[i].asks, *after[i]}
            needed.update(names[i].reads.items())
    return live


def _check_streams(report: GraphReport, scope: Scope, order: Sequence[int], waits: Mapping[int, Set[int]]) -> None:
    """Report steps and outputs that would join two streams, and what has no meaning for a stream (G019).

    The rule of Triton Inference Server: the outputs of a decoupled step carry its label, and so does what is made of
    them. A step that reads two labels would have to join streams of different lengths, which has no meaning.

    Source:
        https://github.com/triton-inference-server/core/blob/main/src/ensemble_utils.cc, ``ValidateEnsembleConfig``
    """
    file, node, names = scope.file, scope.node, scope.names
    labels: dict[int, int] = {}
    for i in order:
        read = dict.fromkeys(labels[producer] for producer in sorted(waits[i]))
        if None in names.steps[i].reads.values():
            read[_ONCE] = None
        streams = [label for label in read if label != _ONCE]
        if len(streams) > 1 or (len(read) > 1 and not file.dialect.repeats_in_streams):
            step, joined = node.steps[i], " and ".join(f"'{node.steps[label].name}'" for label in streams)
            text = file.dialect.joined_streams(file.name, step.name, step.message.model_name, joined)
            report.error("G019", file, target_path(step), text)
        labels[i] = i if i in scope.streaming else next(iter(streams), _ONCE)
    wanted = [name for name in names.outputs if name in scope.call.wanted]
    sources = {name: names.producers[name][-1] for name in wanted if name in names.producers}
    needed = reached(sources.values(), waits.__getitem__)
    for i, step in enumerate(node.steps):
        if i in scope.streaming and i not in needed:
            text = (
                f"step '{step.name}' streams, and no output of {owner_text(file, node)} follows it; "
                "let one read from it, or leave it out"
            )
            report.error("G019", file, target_path(step), text)
    _check_outputs(report, scope, {name: labels[i] for name, i in sources.items()})
    if node.message.sequence.HasField("loop"):
        text = "'loop' is not for a sequence that streams: it gives several responses to a request"
        report.error("G019", file, f"{node.kind_path}.loop", text, is_name=True)


def _check_outputs(report: GraphReport, scope: Scope, labels: Mapping[str, int]) -> None:
    """Check that the outputs of the node follow one stream: each response has all of them."""
    file, node = scope.file, scope.node
    given = [spec.name for spec in declaring(file, node).output]
    prefix = "" if node.name == file.root else f"{node.path}."
    first: tuple[str, int] | None = None
    for name, label in labels.items():
        if label == _ONCE and file.dialect.repeats_in_streams:
            continue
        if first is not None and label != first[1]:
            path = f"{prefix}output[{given.index(name)}].name" if name in given else node.kind_path
            texts = [
                f"'{one}' comes once"
                if of == _ONCE
                else f"'{one}' follows the responses of step '{node.steps[of].name}'"
                for one, of in (first, (name, label))
            ]
            text = f"the responses cannot have both outputs: {' and '.join(texts)}; leave one of them out"
            report.error("G019", file, path, text)
        first = first or (name, label)


def _check_one_response(report: GraphReport, scope: Scope) -> None:
    """Report stream settings in a sequence without a stream (G018)."""
    file, path = scope.file, scope.node.kind_path
    if not scope.node.message.sequence.max_inflight_responses:
        return
    if path != "ensemble_scheduling":
        text = "'max_inflight_responses' has no effect: no step of the sequence streams, so it gives one response"
        report.error("G018", file, f"{path}.max_inflight_responses", text, is_name=True)
        return
    text = "'max_inflight_requests' has no effect: no step calls a decoupled model, so each request gets one response"
    report.warning("G018", file, f"{path}.max_inflight_requests", text)
