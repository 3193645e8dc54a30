"""What ``weft explain`` says of a request of a sample, by models."""

from collections.abc import Iterator

from tests.compat.graphs.shape import Request

from weft.language import GraphPlan
from weft.tools.explain.question import RequestTexts, read_question
from weft.tools.explain.render import ExplainedStep, StepOutcome, render_json, render_text
from weft.tools.explain.tree import explain


def explained_calls(plan: GraphPlan, request: Request) -> tuple[set[str], set[str]]:
    """Models that the request may call and those that it calls unless it fails, by the shapes of its inputs alone."""
    texts = RequestTexts(
        shapes=[(name, ",".join(map(str, array.shape))) for name, array in request.inputs.items()],
        parameters=[(name, str(value)) for name, value in request.parameters.items()],
        outputs=request.outputs,
    )
    question = read_question(texts, plan)
    root = explain(plan, question)
    assert render_text(root, question.num_rows)
    assert render_json(root, question.num_rows)
    calls = list(_calls(root, is_certain=True))
    return {model for model, _ in calls}, {model for model, is_certain in calls if is_certain}


def _calls(entry: ExplainedStep, *, is_certain: bool) -> Iterator[tuple[str, bool]]:
    """Models that steps below may call, and whether they do for certain; shadows may."""
    for child in entry.children:
        if child.outcome.can_run or child.outcome is StepOutcome.SHADOW:
            is_sure = is_certain and child.outcome is StepOutcome.RUNS
            if child.kind == "model":
                yield child.target.partition("@")[0], is_sure
            yield from _calls(child, is_certain=is_sure)
