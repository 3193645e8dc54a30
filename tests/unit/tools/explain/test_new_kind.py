"""A kind of node that `weft explain` has never heard of is explained all the same."""

from dataclasses import dataclass
from typing import ClassVar

from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.tools.explain.explanation import MAYBE, RUNS, SKIPPED, fates

from weft.base.tensors import WireTensor
from weft.language.description import given, offered
from weft.language.path_form import PathForm
from weft.language.plan import Binding, Condition, Description, End, Flow
from weft.language.request_scope import RequestScope
from weft.router.steps.node import Node, NodeParts, OperatorPlan
from weft.router.steps.run import Run
from weft.tools.explain.evaluator import Evaluator, Known, placeholder
from weft.tools.explain.question import Question
from weft.tools.explain.render import Calls, ExplainedStep, count_calls
from weft.tools.explain.tree import explain


@dataclass(frozen=True, slots=True)
class RefinedPlan(OperatorPlan):
    """A first step, and a second that replaces its answer unless that is `fine`."""

    kind: ClassVar[str] = "refined"
    path_form: ClassVar[PathForm] = PathForm.of("/", "/")

    fine: Condition | None = None

    def node(self, parts: NodeParts) -> Node:
        return Refined(self, parts)

    def describe(self) -> Description:
        flows = (Flow(None, 0, (), given(self.steps[0])), Flow(0, 1), Flow(1, None, (), offered(self.steps[1])))
        return Description(self.kind, self.steps, End("refined"), End("the last answer"), flows)


class Refined(Node):
    """Runs a `RefinedPlan`."""

    def __init__(self, plan: RefinedPlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._fine = plan.fine
        self._parts = parts

    async def run(self, run: Run) -> None:
        first, second = self._parts.steps
        await first.run(run)
        if self._fine is None or not self._parts.error_context.holds(self._fine, run, self.plan.path):
            await second.run(run)


def refined(tensor: str, x: WireTensor) -> ExplainedStep:
    """A node of the new kind whose condition reads a tensor, X or Y, for a request with that X."""
    specs = [make.spec("X", "FP32", (1,))], [make.spec("Y", "FP32", (1,))]
    steps = [make.step(name, make.call_plan(f"m_{name}", *specs), {"X": "X"}, {"Y": "Y"}) for name in ("a", "b")]
    slot = ("X", "Y").index(tensor)
    fine = FakeCondition(
        lambda _, values: bool(values[tensor] > 0), f"{tensor} > 0", (Binding(tensor, slot),), names=(tensor,)
    )
    plan = make.graph(make.node("root", RefinedPlan, steps, inputs=["X"], outputs=["Y"], fine=fine))
    return explain(plan, Question(Evaluator(RequestScope({}, {})), {"X": x}, None, (), {}, ()))


def test_a_condition_of_its_own_decides():
    """Its condition is evaluated with what the request brings, and shown under the name of its field."""
    root = refined("X", Known(*make.tensor(1.0)))
    assert ({"a": RUNS, "b": SKIPPED}, ["fine X > 0 = true"], "refined") == (fates(root), root.decisions, root.kind)
    root = refined("X", Known(*make.tensor(-1.0)))
    assert ({"a": RUNS, "b": RUNS}, ["fine X > 0 = false"]) == (fates(root), root.decisions)


def test_what_a_model_answers_is_open():
    """Where the condition reads an answer both paths are followed, and the calls of the longer one count."""
    root = refined("Y", Known(*make.tensor(1.0)))
    assert ({"a": RUNS, "b": MAYBE}, ["Y of a -> m_a"]) == (fates(root), root.children[1].depends_on)
    assert (Calls(2, 2), ["fine Y > 0 = ?"]) == (count_calls(root), root.decisions)


def test_an_input_that_is_not_known_is_open():
    """So is a tensor of the request of which only the shape is known."""
    root = refined("X", placeholder(make.spec("X", "FP32", (1,)), None, "X of the request"))
    assert ["X of the request"] == root.children[1].depends_on
