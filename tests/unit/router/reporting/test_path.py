"""The path and the timings of a request."""

import json
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.language.plan import GraphPlan, NodePlan
from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan
from weft.router.reporting.path import MAX_PATH_CHARS, NodeRecord, StepRecord, UsualPath, path_text, trace_text


def sentiment() -> GraphPlan:
    """lid, then a switch by language, then post."""
    on = FakeCondition(lambda request, frame: request.parameters.get("lang", "de"))
    branches = [
        make.step("de", "bert_de", {"IN": "T"}, {"OUT": "P"}, cases=("de",)),
        make.step("rest", "xlmr", {"IN": "T"}, {"OUT": "P"}, is_otherwise=True),
    ]
    by_language = make.node("by_language", SwitchPlan, branches, inputs=["T"], outputs=["P"], on=on)
    steps = [
        make.step("lid", "lang_id", {"IN": "X"}, {"OUT": "T"}),
        make.step("clf", by_language, {"T": "T"}, {"P": "P"}),
        make.step("post", "label", {"IN": "P"}, {"OUT": "Y"}),
    ]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]), name="sentiment")


@pytest.mark.parametrize(
    ("lang", "expected"),
    [("de", "root.lid;clf=by_language[de];post"), ("fr", "root.lid;clf=by_language[rest];post")],
)
async def test_the_path_shows_steps_and_branches(lang: str, expected: str) -> None:
    """It is sent after every answer."""
    context = CallContext()
    await make.run(sentiment(), FakeTarget(), parameters={"lang": lang}, context=context)
    assert [("x-graph-path", expected)] == context.trailing_metadata


async def test_the_path_of_a_failed_request_ends_where_it_failed() -> None:
    """Every node on the way to the failure is marked."""

    async def fail(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise RemoteError("INTERNAL", "boom")

    context = CallContext()
    with pytest.raises(RemoteError):
        await make.run(sentiment(), FakeTarget(bert_de=fail), context=context)
    assert [("x-graph-path", "root.lid;clf=by_language[de!]!")] == context.trailing_metadata


async def test_graph_trace_gives_the_time_of_every_step() -> None:
    """Path, target, model, the version that answered, start, duration and status, nodes included."""

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        return InferResult(call.model_name, "3", "", {}, {"OUT": call.inputs["IN"]})

    result = await make.run(sentiment(), FakeTarget(bert_de=answer), parameters={"graph_trace": True})
    entries = json.loads(str(result.parameters["graph_trace"]))
    assert [
        ("root/lid", "model", "lang_id", "1", "OK"),
        ("root/clf", "", "", "", "OK"),
        ("by_language/de", "model", "bert_de", "3", "OK"),
        ("root/post", "model", "label", "1", "OK"),
    ] == [tuple(entry[key] for key in ("path", "target", "model", "version", "status")) for entry in entries]
    lid, clf, _, post = entries
    assert 0 <= lid["start_ms"] <= lid["start_ms"] + lid["ms"] <= clf["start_ms"] + 0.01
    assert clf["start_ms"] + clf["ms"] <= post["start_ms"] + 0.01


async def test_without_graph_trace_the_answer_has_no_parameter() -> None:
    """The default costs nothing."""
    result = await make.run(sentiment(), FakeTarget(), parameters={"graph_trace": False})
    assert {} == result.parameters


async def test_nested_kinds_have_brackets_of_their_own() -> None:
    """A sequence in an ensemble in a sequence reads without doubt."""
    inner = make.node(
        "pair",
        SequencePlan,
        [make.step("p", "p", {"IN": "X"}, {"OUT": "T"}), make.step("q", "q", {"IN": "T"}, {"OUT": "Y"})],
        inputs=["X"],
        outputs=["Y"],
    )
    votes = make.node(
        "votes",
        EnsemblePlan,
        [make.step("a", inner, {"X": "X"}, {"Y": "a.Y"}), make.step("b", "b", {"IN": "X"}, {"OUT": "b.Y"})],
        inputs=["X"],
        outputs=["Y"],
        combines=[("Y", METHODS["VOTE"], {"a": "a.Y", "b": "b.Y"}, {})],
    )
    steps = [make.step("v", votes, {"X": "X"}, {"Y": "V"}), make.step("z", "z", {"IN": "V"}, {"OUT": "Y"})]
    context = CallContext()
    await make.run(
        make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"])),
        FakeTarget(),
        context=context,
    )
    assert [("x-graph-path", "root.v=votes{a=pair(p;q);b};z")] == context.trailing_metadata


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


def node_run(name: str, kind: type[NodePlan], *steps: StepRecord) -> NodeRecord:
    run = NodeRecord(name, kind.path_form)
    run.steps += steps
    return run


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            node_run("root", CascadePlan, ran("tiny"), ran("base", "UNAVAILABLE"), ran("large")),
            "root<tiny;base!;large>",
        ),
        (node_run("root", CascadePlan, ran("tiny", rows=32), ran("base", rows=5)), "root<tiny#32;base#5>"),
        (node_run("root", SwitchPlan, ran("de", rows=3), ran("en", rows=5)), "root[de#3;en#5]"),
        (node_run("root", EnsemblePlan, ran("a"), ran("b", "CANCELLED"), ran("c", "INTERNAL")), "root{a;b~;c!}"),
        (node_run("root", SequencePlan, ran("a", "SKIPPED"), ran("b"), ran("c", "SKIPPED"), ran("d")), "root.b;d"),
        (node_run("root", EnsemblePlan, ran("a", "SKIPPED")), "root"),
        (node_run("root", SequencePlan), "root"),
        (node_run("root", SequencePlan, ran("a"), ran("b"), ran("a"), ran("b")), "root.a;b;a;b"),
        (
            node_run(
                "root",
                SequencePlan,
                ran(
                    "clf",
                    "UNAVAILABLE",
                    rows=4,
                    node=node_run("sw", SwitchPlan, ran("de", "UNAVAILABLE")),
                    fallbacks=node_run("clf", CascadePlan, ran("x", "INTERNAL"), ran("y")),
                ),
                ran("z"),
            ),
            "root.clf#4=sw[de!]!>x!>y;z",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_run_has_its_text(run: NodeRecord, expected: str) -> None:
    """As the grammar says."""
    assert expected == path_text(run)


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


def test_the_trace_tells_what_applies_to_a_step_and_nothing_else() -> None:
    """Attempts, cache, rows, the error that was survived, and whose fallback it is."""
    failed = ran(
        "a",
        "UNAVAILABLE",
        attempts=2,
        error="gone",
        fallbacks=node_run("a", CascadePlan, ran("f", cached=False, rows=3)),
    )
    run = node_run("root", SequencePlan, failed, ran("b", cached=True), ran("c", "SKIPPED"))
    common = {"target", "model", "version", "start_ms", "ms", "path", "status"}
    entries = json.loads(trace_text(run, 0))
    assert [
        {"attempts": 2, "error": "gone"},
        {"cached": False, "rows": 3, "fallback_of": "root/a"},
        {"cached": True},
        {},
    ] == [{key: value for key, value in entry.items() if key not in common} for entry in entries]
    assert ["root/a", "root/f", "root/b", "root/c"] == [entry["path"] for entry in entries]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (ran("a"), True),
        (ran("a", "UNAVAILABLE"), False),
        (ran("a", "SKIPPED"), False),
        (ran("a", "UNAVAILABLE", fallbacks=node_run("a", CascadePlan, ran("x", "INTERNAL"), ran("y"))), True),
        (ran("a", "INTERNAL", fallbacks=node_run("a", CascadePlan, ran("x", "INTERNAL"))), False),
    ],
)
def test_a_step_has_answered_if_it_or_its_fallback_did(step: StepRecord, expected: bool) -> None:
    """Whatever became of it before."""
    assert expected == step.has_answered
