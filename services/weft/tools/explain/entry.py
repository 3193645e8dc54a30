"""What becomes of each step: the result of an explanation, before it is printed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from weft.language.description import target_text
from weft.language.plan import NodePlan, StepPlan
from weft.tools.wording import default_texts, policy_texts


class StepOutcome(Enum):
    """What becomes of a step, if that is what becomes of the node around it."""

    RUNS = "runs"
    MAYBE = "may run"
    SKIPPED = "skipped"
    PRUNED = "pruned"
    FAILS = "fails"
    ON_ERROR = "on error"
    SHADOW = "shadow"

    @property
    def can_run(self) -> bool:
        """Whether its call counts among those of the request at worst."""
        return self in (StepOutcome.RUNS, StepOutcome.MAYBE, StepOutcome.FAILS, StepOutcome.ON_ERROR)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An output of the graph that the answer lacks, or may lack, if ``depends_on`` says what decides it."""

    name: str
    depends_on: tuple[str, ...] = ()


@dataclass(slots=True)
class ExplainedStep:
    """One step, or the root node.

    Attributes:
        path: For example ``root/clf[de]``.
        target: ``bert_de@3``, ``node by_language``, ``graph inner/7``.
        kind: "model" or the kind of the node.
        why: Reasons for the outcome.
        depends_on: Tensors that decide it and are not known: ``LANG of lid -> lang_id``.
        decisions: How the node inside chooses or combines.
        notes: Policies and softness.
        left_out: Of the root.
        may_fail: Errors that unknown values may lead to.
        failure: Why it fails for certain, ``INVALID_ARGUMENT: ...`` as the client would see it; "" if it may not.
        deadline_ms: It has at most that long; None without limit.
        num_rounds: Of a loop, at most.
        stream: Decoupled step for each of whose responses it runs once; "" for none.
        each: What the steps inside run once for, ``chunk of CROPS``; "" where that is the request.
        children: The steps inside, and its fallbacks.
        together: Places in ``children`` of the steps that call something in one request, for each path that it may go,
            and whether a call fails or is late on it.
        step, node: The plan; the root has no step, a call of a model has no node.
    """

    name: str
    path: str
    target: str
    kind: str
    outcome: StepOutcome = StepOutcome.RUNS
    why: list[str] = field(default_factory=list)
    depends_on: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    may_fail: list[str] = field(default_factory=list)
    failure: str = ""
    deadline_ms: float | None = None
    num_rounds: int = 1
    stream: str = ""
    each: str = ""
    children: "list[ExplainedStep]" = field(default_factory=list)
    together: list[tuple[bool, frozenset[int]]] = field(default_factory=list)
    step: StepPlan | None = None
    node: NodePlan | None = None

    @classmethod
    def of(cls, step: StepPlan, outcome: StepOutcome, why: Iterable[str] = ()) -> "ExplainedStep":
        """The entry of a step."""
        kind = step.action.kind if isinstance(step.action, NodePlan) else "model"
        return cls(step.name, step.path, target_text(step.action), kind, outcome, list(why), step=step)

    def noted(self, node: NodePlan) -> "ExplainedStep":
        """The same with what the policies of the step, one of ``node``, say."""
        if self.step is not None:
            step = self.step
            soft = ["soft: the request goes on without it"] if step.is_soft else []
            waits = node.describe().waits_of(node.steps.index(step)) if step in node.steps else []
            self.notes = [*waits, *soft, *default_texts(step, node), *policy_texts(step)]
        return self


def make_unsure(entries: Iterable[ExplainedStep], depends_on: str) -> None:
    """What would run only may, because something else may come first."""
    for entry in entries:
        if entry.outcome is StepOutcome.RUNS:
            entry.outcome = StepOutcome.MAYBE
            entry.depends_on.append(depends_on)
