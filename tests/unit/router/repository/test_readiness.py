"""Which models must be ready for a graph to be."""

from typing import Any

import pytest
from tests.unit.router import make

from weft.language.plan import NodePlan, ShadowPlan
from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan
from weft.router.repository.serving import missing_call, steps_of, tolerated_calls


def missing(node: NodePlan, *lost: str) -> str:
    """Name of the model for want of which the node cannot answer; "" if it can."""
    found = missing_call(node, lambda call: call.model_name not in lost)
    return "" if found is None else found.call.model_name


def node(kind: type[NodePlan], *steps: Any, **options: Any) -> NodePlan:
    return make.node("root", kind, steps, inputs=["X"], outputs=["Y"], **options)


def step(name: str, **options: Any) -> Any:
    return make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **options)


@pytest.mark.parametrize("kind", [SwitchPlan, SplitterPlan])
def test_every_branch_is_needed(kind: type[NodePlan]) -> None:
    """Some request would take the one that is lost."""
    root = node(kind, step("a"), step("b", is_soft=kind is SwitchPlan))
    assert ["", "a", "b", "a"] == [missing(root), missing(root, "a"), missing(root, "b"), missing(root, "a", "b")]


def test_a_sequence_needs_what_is_not_soft() -> None:
    """A soft step leaves its outputs absent, and a shadow gives none."""
    root = node(
        SequencePlan,
        step("hard"),
        make.step("soft", "soft", {"IN": "X"}, {"OUT": "S"}, is_soft=True),
        make.step("shadow", "shadow", {"IN": "X"}, {}, shadow=ShadowPlan(10.0, 0)),
    )
    assert ["hard", "", ""] == [missing(root, name) for name in ("hard", "soft", "shadow")]


def test_one_of_a_step_and_its_fallbacks_is_enough() -> None:
    """When all are lost, the step's own model is named."""
    fallback = step("b", fallback=step("c"))
    root = node(SequencePlan, step("a", fallback=fallback))
    assert ["", "", "a"] == [missing(root, "a"), missing(root, "a", "b"), missing(root, "a", "b", "c")]


def test_an_ensemble_needs_its_quorum() -> None:
    """Beside its hard steps, and at least one."""
    soft = [step(name, is_soft=True) for name in "ab"]
    combine = [("Y", METHODS["VOTE"], {}, {})]
    some = node(EnsemblePlan, *soft, combines=combine)
    assert ["", "a"] == [missing(some, "a"), missing(some, "a", "b")]
    two = node(EnsemblePlan, *soft, step("hard"), combines=combine, quorum=2)
    assert ["", "hard", "a"] == [missing(two, "a"), missing(two, "hard"), missing(two, "a", "b")]
    race = node(EnsemblePlan, step("a"), step("b"), combines=[("Y", METHODS["FIRST"], {}, {})])
    assert ["", "a"] == [missing(race, "a"), missing(race, "a", "b")]


def test_a_cascade_needs_an_answer_and_what_is_not_soft() -> None:
    """A soft step that fails passes on to the next."""
    root = node(CascadePlan, step("tiny", is_soft=True), step("large", is_soft=True))
    assert ["", "", "tiny"] == [missing(root, "tiny"), missing(root, "large"), missing(root, "tiny", "large")]
    hard = node(CascadePlan, step("tiny"), step("large", is_soft=True))
    assert ["tiny", ""] == [missing(hard, "tiny"), missing(hard, "large")]


def test_nodes_in_nodes_count_as_their_step_does() -> None:
    """What a nested node lacks is lacking only where nothing stands in for the step."""
    inner = node(SwitchPlan, step("a"), step("b"))
    nested = make.step("nested", inner, {"X": "X"}, {"Y": "Y"})
    assert "b" == missing(node(SequencePlan, nested), "b")
    softened = make.step("nested", inner, {"X": "X"}, {"Y": "Y"}, is_soft=True)
    assert "" == missing(node(SequencePlan, softened), "b")


def test_every_step_is_known() -> None:
    """Those of fallbacks, combines, nested nodes and shadows too: a model that changes changes the graph."""
    inner = node(SequencePlan, step("deep", fallback=step("deep_fallback")))
    custom = make.step("judge", "judge", {"IN": "S", "MASK": "M"}, {"OUT": "Y"})
    root = node(
        EnsemblePlan,
        make.step("nested", inner, {"X": "X"}, {"Y": "Y"}, fallback=step("spare")),
        combines=[("Y", METHODS["CUSTOM"], {}, {"custom": custom, "stack": "S", "mask": "M"})],
        shadows=node(SequencePlan, step("shadow", shadow=ShadowPlan(10.0, 0))).steps,
    )
    names = [step.name for _, step in steps_of(root)]
    assert ["nested", "deep", "deep_fallback", "spare", "judge", "shadow"] == names
    assert inner.steps[0] in [step for node, step in steps_of(root) if node is inner]
    assert ["judge", ""] == [missing(root, "judge"), missing(root, "shadow")]


def test_what_is_borne_is_named() -> None:
    """Soft steps and steps with a fallback that lack their model, with their paths; shadows do not count."""
    root = node(
        SequencePlan,
        make.step("soft", "soft", {"IN": "X"}, {"OUT": "S"}, is_soft=True),
        step("a", fallback=step("b")),
        make.step("shadow", "shadow", {"IN": "X"}, {}, shadow=ShadowPlan(10.0, 0)),
    )
    assert "" == missing(root, "soft", "a", "shadow")
    found = tolerated_calls(root, lambda call: call.model_name not in ("soft", "a", "shadow"))
    assert ["soft", "a"] == [borne.call.model_name for borne in found]
    assert [root.steps[0], root.steps[1]] == [borne.step for borne in found]
