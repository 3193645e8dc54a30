"""Explanations as tests ask for them and look into them."""

from typing import Any

from tests.unit.tools.graphs import compiled, text_graph

from weft.language import GraphPlan
from weft.tools.explain.question import RequestTexts, read_question
from weft.tools.explain.render import ExplainedStep, StepOutcome
from weft.tools.explain.tree import explain

RUNS, MAYBE, SKIPPED, FAILS = StepOutcome.RUNS, StepOutcome.MAYBE, StepOutcome.SKIPPED, StepOutcome.FAILS
SHORT = ("TEXT", '"short"')


def explained(plan: GraphPlan | str, **texts: Any) -> ExplainedStep:
    """The root's entry for a request with these texts, as of ``RequestTexts``."""
    plan = compiled(plan) if isinstance(plan, str) else plan
    return explain(plan, read_question(RequestTexts(**texts), plan))


def find(entry: ExplainedStep, name: str) -> ExplainedStep:
    """The first entry of that name, top down."""
    waiting = [entry]
    while waiting:
        one = waiting.pop(0)
        if one.name == name:
            return one
        waiting += one.children
    raise AssertionError(f"no step {name}")


def fates(entry: ExplainedStep) -> dict[str, StepOutcome]:
    """What becomes of each step of a node."""
    return {child.name: child.outcome for child in entry.children}


def switch(branches: str, on: str = "") -> str:
    """A graph whose root is a switch."""
    return text_graph(f'node {{ name: "root" switch {{ {on} {branches} }} }}')
