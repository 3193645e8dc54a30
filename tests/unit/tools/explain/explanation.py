"""Explanations as tests ask for them and look into them."""

from typing import Any

from tests.unit.tools.graphs import compiled

from weft.language import GraphPlan
from weft.tools.explain.question import read_question
from weft.tools.explain.render import ExplainedStep, StepOutcome
from weft.tools.explain.tree import explain

RUNS, MAYBE, SKIPPED = StepOutcome.RUNS, StepOutcome.MAYBE, StepOutcome.SKIPPED


def explained(plan: GraphPlan | str, **texts: Any) -> ExplainedStep:
    """The root's entry for a request with these texts, as of ``read_question``."""
    plan = compiled(plan) if isinstance(plan, str) else plan
    return explain(plan, read_question(plan, **texts))


def fates(entry: ExplainedStep) -> dict[str, StepOutcome]:
    """What becomes of each step of a node."""
    return {child.name: child.outcome for child in entry.children}
