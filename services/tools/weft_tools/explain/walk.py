"""Walks a plan as a request would, with what is known of it."""

from collections.abc import Collection, Mapping

from weft_router.graph.description import condition_text, slot_name
from weft_router.graph.plan import OK, CallPlan, GraphPlan, NodePlan, StepPlan
from weft_tools.explain.branches import walk_choice, walk_ensemble
from weft_tools.explain.cascade import CascadeWalk
from weft_tools.explain.choices import StepChoice, verdict_text
from weft_tools.explain.entry import ExplainedStep, Failure, Fate, entry_of, skipped
from weft_tools.explain.judge import Knowledge
from weft_tools.explain.sequence import walk_sequence
from weft_tools.explain.values import ABSENT, Value, joined
from weft_tools.wording import limit_texts

Values = list[Value]


class Walk:
    """One request on its way through a graph.

    Args:
        plan: The graph.
        knowledge: Of the request.
        num_rows: Of its batch; None where not known: defaults are then taken as those of one row.
        pins: Splitter -> step, as the header ``x-graph-route`` says.
    """

    def __init__(
        self, plan: GraphPlan, knowledge: Knowledge, num_rows: int | None, pins: Mapping[str, str] | None = None
    ) -> None:
        signature = plan.signature
        self.knowledge = knowledge
        self.num_rows = num_rows
        self.pins = pins or {}
        self.prefix = (
            f"in ensemble '{signature.name}', " if plan.is_ensemble else f"{signature.name}/{signature.version}: "
        )
        self._plan = plan
        self.is_batched = signature.max_batch_size > 0

    def run(self, inputs: Mapping[str, Value], live: Collection[int] | None = None) -> ExplainedStep:
        """The root's entry.

        Args:
            inputs: By name; one that is not here is absent.
            live: Indexes of the root's steps that the outputs asked for need; None means all.
        """
        plan, root = self._plan, self._plan.root
        limit = least(self.knowledge.remaining_ms, plan.timeout_ms, root.timeout_ms)
        label = f"{plan.signature.name}/{plan.signature.version}"
        entry = ExplainedStep(root.name, root.path, label, root.kind, deadline_ms=limit, node=root)
        entry.notes = limit_texts(0, plan.max_inflight)
        if plan.signature.is_decoupled:
            entry.decisions.append("answers with a stream of responses")
        if plan.cache is not None:
            entry.notes.append(f"whole answers: {plan.cache.text()}")
        frame = [ABSENT] * root.num_slots
        for name, slot in root.inputs:
            frame[slot] = inputs.get(name, ABSENT)
        self.node(entry, root, frame, limit, live)
        if entry.failure is not None:
            entry.fate = Fate.FAILS
        return entry

    def node(
        self,
        entry: ExplainedStep,
        node: NodePlan,
        frame: Values,
        limit: float | None,
        live: Collection[int] | None = None,
    ) -> None:
        """Fill the entry's children and the outputs in ``frame``; ``entry.failure`` is set if the node fails."""
        entry.children += [self.shadow(shadow, node, frame, limit) for shadow in node.shadows]
        match node.kind:
            case "sequence":
                walk_sequence(self, entry, node, frame, limit, range(len(node.steps)) if live is None else live)
            case "ensemble":
                walk_ensemble(self, entry, node, frame, limit)
            case "cascade":
                CascadeWalk(self, entry, node, frame, limit).run()
            case _:
                walk_choice(self, entry, node, frame, limit)

    def step(
        self, step: StepPlan, node: NodePlan, frame: Values, limit: float | None, choice: StepChoice
    ) -> ExplainedStep:
        """The entry of a step that runs, or may; what it gives is in ``frame``."""
        entry = self._attempt(step, node, frame, least(limit, step.timeout_ms), choice)
        if step.fallback is not None:
            self._fall_back(entry, step.fallback, node, frame, limit)
        if step.is_soft and (entry.failure is None or not entry.failure.is_final):
            lost = frame.copy()
            self.skip(step, lost)
            if entry.failure is not None:
                entry.why.append(f"{entry.failure.message}; the request goes on without it")
                entry.fate, entry.soft_failure, entry.failure = Fate.FAILS, entry.failure, None
            for slot in slots_given(step):
                either = joined((frame[slot], lost[slot]), f"whether {step.name} answers")
                frame[slot] = lost[slot] if entry.soft_failure is not None else either
        elif entry.failure is not None:
            entry.fate = Fate.FAILS
        return entry

    def shadow(self, step: StepPlan, node: NodePlan, frame: Values, limit: float | None) -> ExplainedStep:
        """The entry of a shadow; it changes nothing."""
        why = [step.shadow.text()] if step.shadow is not None else []
        entry = self.tested(step, node, frame.copy(), None, StepChoice(Fate.SHADOW, why))
        entry.fate = Fate.SKIPPED if entry.fate is Fate.SKIPPED else Fate.SHADOW
        entry.failure = None
        return entry

    def skip(self, step: StepPlan, frame: Values) -> None:
        """What the step gives is absent, or has its default."""
        for slot in slots_given(step):
            frame[slot] = ABSENT
        for slot, tensor, is_batched in step.defaults:
            value = Value.known(tensor)
            frame[slot] = value.rows([0] * self.num_rows) if is_batched and self.num_rows is not None else value

    def _fall_back(
        self, entry: ExplainedStep, below: StepPlan, node: NodePlan, frame: Values, limit: float | None
    ) -> None:
        """Add the fallback's entry: it runs if the step is bound to fail, else it may give the outputs."""
        other = frame.copy()
        child = self.step(below, node, other, limit, StepChoice(Fate.ON_ERROR))
        entry.children.append(child)
        is_needed = entry.failure is not None and not entry.failure.is_final
        if is_needed and entry.failure is not None:
            child.fate = Fate.FAILS if child.failure else Fate.RUNS
            entry.why.append(entry.failure.message)
            entry.failure = child.failure
        for slot in slots_given(below):
            frame[slot] = other[slot] if is_needed else joined((frame[slot], other[slot]))

    def _attempt(
        self, step: StepPlan, node: NodePlan, frame: Values, limit: float | None, choice: StepChoice
    ) -> ExplainedStep:
        """The step without its fallback; if it is bound to fail, ``failure`` says why."""
        action = step.action
        entry = entry_of(step, node, choice.fate)
        entry.why, entry.depends_on, entry.deadline_ms = choice.why, choice.depends_on, limit
        if limit is not None and limit < step.min_remaining_ms and node.kind != "cascade":
            entry.failure = Failure(
                f"DEADLINE_EXCEEDED: {self.prefix}{step.path}: at most {limit:g} ms are left, and "
                f"'min_remaining_ms' of the step asks for {step.min_remaining_ms}"
            )
        elif isinstance(action, CallPlan):
            origin = f"{step.name} -> {entry.target}"
            for name, slot in step.outputs:
                is_batched = self.is_batched and action.signature.max_batch_size > 0
                source = f"{slot_name(node, slot) or name} of {origin}"
                frame[slot] = Value.unknown(node.specs.get(slot), self.num_rows, source, is_batched=is_batched)
        else:
            entry.node = action
            inner = [ABSENT] * action.num_slots
            slots, given = dict(action.inputs), dict(action.outputs)
            for name, slot in step.inputs:
                inner[slots[name]] = frame[slot]
            entry.deadline_ms = least(limit, action.timeout_ms)
            self.node(entry, action, inner, entry.deadline_ms)
            for name, slot in step.outputs:
                frame[slot] = inner[given[name]]
        if step.ok_slot >= 0:
            frame[step.ok_slot] = Value.known(OK)
        return entry

    def tested(
        self, step: StepPlan, node: NodePlan, frame: Values, limit: float | None, choice: StepChoice
    ) -> ExplainedStep:
        """The entry of a step that ``choice`` lets run if its ``when`` holds."""
        if step.when is None:
            return self.step(step, node, frame, limit, choice)
        verdict = self.knowledge.judge(step.when, frame)
        choice.why.append(f"when {condition_text(step.when)}{verdict_text(verdict)}")
        error = f"INVALID_ARGUMENT: {self.prefix}{step.path}: {verdict.error}"
        if verdict.fails:
            entry = skipped(step, choice.why, Fate.FAILS)
            entry.failure = Failure(error, is_final=True)
            return entry
        if verdict.value is True:
            return self.step(step, node, frame, limit, choice)
        without = frame.copy()
        self.skip(step, without)
        if verdict.is_known:
            frame[:] = without
            return skipped(step, choice.why)
        fate = Fate.SHADOW if choice.fate is Fate.SHADOW else Fate.MAYBE
        entry = self.step(
            step, node, frame, limit, StepChoice(fate, choice.why, [*choice.depends_on, *verdict.depends_on])
        )
        if entry.failure is not None:
            entry.may_fail.append(entry.failure.message)
            entry.fate, entry.failure = fate, None
        if verdict.error:
            entry.may_fail.append(error)
        for slot in slots_given(step):
            frame[slot] = joined((frame[slot], without[slot]), f"whether {step.name} runs")
        return entry


def least(*limits_ms: float | None) -> float | None:
    """The smallest limit; 0 and None are none."""
    return min((limit for limit in limits_ms if limit), default=None)


def slots_given(step: StepPlan) -> list[int]:
    """Slots that a step fills."""
    return [*(binding.slot for binding in step.outputs), *([step.ok_slot] if step.ok_slot >= 0 else [])]
