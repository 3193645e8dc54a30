"""The text of a path; what is on it is in the scenes beside this file."""

from typing import Any

from weft.router.operators.cascade import CascadePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.reporting.path import MAX_PATH_CHARS, NodeRecord, StepRecord, UsualPath, path_text


def test_a_path_is_a_legal_header() -> None:
    """It is printable ASCII and of bounded length, whatever the names are."""
    run = NodeRecord("wurzel-ü\n", SequencePlan.path_form)
    assert "wurzel-??" == path_text(run)
    for index in range(1_000):
        step = StepRecord(f"step{index}", "", 0)
        step.status = "OK"
        run.steps.append(step)
    text = path_text(run)
    assert MAX_PATH_CHARS == len(text)
    assert text.endswith("...")


def ran(name: str, status: str = "OK", **fields: Any) -> StepRecord:
    step = StepRecord(name, f"root/{name}", 0)
    step.status = status
    for field, value in fields.items():
        setattr(step, field, value)
    return step


def node_run(name: str, kind: Any, *steps: StepRecord) -> NodeRecord:
    run = NodeRecord(name, kind.path_form)
    run.steps += steps
    return run


def test_the_usual_path_is_that_of_the_run_whatever_deviates() -> None:
    """It is written once; a run that started another number of steps, or of which one did not answer, has its own."""
    usual = UsualPath(num_steps=2)
    all_answered = node_run("root", SequencePlan, ran("a"), ran("b"))
    texts = [usual.text_of(all_answered) for _ in range(2)]
    assert texts[0] is texts[1]
    for run in (
        all_answered,
        node_run("root", SequencePlan),
        node_run("root", SequencePlan, ran("a", "UNAVAILABLE")),
        node_run("root", SequencePlan, ran("a"), ran("b", "SKIPPED")),
        node_run("root", SequencePlan, ran("a", is_stale=True), ran("b")),
        node_run("root", SequencePlan, ran("a", "INTERNAL", fallbacks=node_run("a", CascadePlan, ran("x"))), ran("b")),
        node_run("root", SequencePlan, ran("a"), ran("b"), ran("a"), ran("b")),
    ):
        assert path_text(run) == usual.text_of(run)
