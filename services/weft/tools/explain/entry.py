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


@dataclass(slots=True)
class Failure:
    """Why a step or node fails.

    Attributes:
        message: ``INVALID_ARGUMENT: ...`` as the client would see it.
        is_final: No fallback and no softness helps.
    """

    message: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An output of the graph that the answer lacks, or may lack.

    Attributes:
        name: Of the output.
        depends_on: What decides it; empty where the answer certainly lacks it.
    """

    name: str
    depends_on: tuple[str, ...] = ()


@dataclass(slots=True)
class ExplainedStep:
    """One step, or the root node.

    Attributes:
        name: Of the step.
        path: For example ``root/clf[de]``.
        target: ``bert_de@3``, ``node by_language``, ``graph inner/7``.
        kind: "model" or the kind of the node.
        outcome: What becomes of it.
        why: Reasons for that.
        depends_on: Tensors that decide it and are not known: ``LANG of lid -> lang_id``.
        decisions: How the node inside chooses or combines.
        notes: Policies and softness.
        left_out: Of the root: outputs that the answer lacks, or may lack.
        may_fail: Errors that unknown values may lead to.
        failure: Why it fails for certain.
        soft_failure: The same of a step that the request goes on without.
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
    failure: Failure | None = None
    soft_failure: Failure | None = None
    deadline_ms: float | None = None
    num_rounds: int = 1
    stream: str = ""
    each: str = ""
    children: "list[ExplainedStep]" = field(default_factory=list)
    together: list[tuple[bool, frozenset[int]]] = field(default_factory=list)
    step: StepPlan | None = None
    node: NodePlan | None = None


def entry_of(step: StepPlan, node: NodePlan, outcome: StepOutcome) -> ExplainedStep:
    """The entry of a step of ``node``, with what its policies say."""
    soft = ["soft: the request goes on without it"] if step.is_soft else []
    waits = node.describe().waits_of(node.steps.index(step)) if step in node.steps else []
    notes = [*waits, *soft, *default_texts(step, node), *policy_texts(step)]
    kind = step.action.kind if isinstance(step.action, NodePlan) else "model"
    return ExplainedStep(step.name, step.path, target_text(step.action), kind, outcome, notes=notes, step=step)


def skipped(step: StepPlan, why: Iterable[str], outcome: StepOutcome = StepOutcome.SKIPPED) -> ExplainedStep:
    """The entry of a step that does not run."""
    kind = step.action.kind if isinstance(step.action, NodePlan) else "model"
    return ExplainedStep(step.name, step.path, target_text(step.action), kind, outcome, list(why), step=step)


def make_unsure(entries: Iterable[ExplainedStep], depends_on: str) -> None:
    """What would run only may, because something else may come first."""
    for entry in entries:
        if entry.outcome is StepOutcome.RUNS:
            entry.outcome = StepOutcome.MAYBE
            entry.depends_on.append(depends_on)
