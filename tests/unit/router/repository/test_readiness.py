"""Which models must be ready for a graph to be."""

from typing import Any

from tests.unit.router import make

from weft.language.plan import NodePlan, ShadowPlan, steps_of
from weft.router.combine import METHODS
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.sequence import SequencePlan
from weft.router.repository.serving import missing_call


def missing(node: NodePlan, *lost: str) -> str:
    """Name of the model for want of which the node cannot answer; "" if it can."""
    found = missing_call(node, lambda call: call.model_name not in lost)
    return "" if found is None else found.call.model_name


def node(kind: type[NodePlan], *steps: Any, **options: Any) -> NodePlan:
    return make.node("root", kind, steps, inputs=["X"], outputs=["Y"], **options)


def step(name: str, **options: Any) -> Any:
    return make.step(name, name, {"IN": "X"}, {"OUT": "Y"}, **options)


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
