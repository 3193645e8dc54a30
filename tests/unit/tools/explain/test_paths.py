"""The paths of a node: how many are followed, and what stands in for unknown tensors and draws."""

import time

from tests.unit.router import make
from tests.unit.tools.explain.explanation import MAYBE, RUNS, SKIPPED, explained, fates
from tests.unit.tools.graphs import text_graph

from weft.language.request_scope import RequestScope
from weft.router.operators.splitter import SplitterPlan
from weft.tools.explain import paths
from weft.tools.explain.evaluator import Evaluator
from weft.tools.explain.question import Question
from weft.tools.explain.tree import explain

MANY = text_graph(
    """node { name: "root" ensemble {
      step { name: "a" model_name: "xlmr" when: 'text(inputs.TEXT) != "a"' }
      step { name: "b" model_name: "xlmr" when: 'text(inputs.TEXT) != "b"' }
      step { name: "c" model_name: "xlmr" }
      combine { output: "PROBS" method: AVERAGE } } }"""
)


def test_nothing_is_certain_where_not_all_ways_are_followed(monkeypatch):
    """A node with too many paths says so, and its steps only may run."""
    assert {"a": MAYBE, "b": MAYBE, "c": RUNS} == fates(explained(MANY))
    monkeypatch.setattr(paths, "MAX_PATHS", 2)
    root = explained(MANY)
    assert {"a": MAYBE, "b": MAYBE, "c": MAYBE} == fates(root)
    assert root.decisions[-1].endswith("ways to go; not all were followed")


def test_every_step_that_can_be_drawn_may_run():
    """However small its weight; one without weight is never drawn."""
    weights = {"a": 0.0, "b": 1e-9, "c": 1.0, "d": 0.0}
    call = make.call_plan("m", [make.spec("X")], [make.spec("Y")])
    steps = [make.step(name, call, {"X": "X"}, {"Y": "Y"}, weight=weight) for name, weight in weights.items()]
    plan = make.graph(make.node("root", SplitterPlan, steps, inputs=["X"], outputs=["Y"]))
    root = explain(plan, Question(Evaluator(RequestScope({}, {})), {"X": make.tensor(1.0)}, None, (), {}, ()))
    assert {"a": SKIPPED, "b": MAYBE, "c": MAYBE, "d": SKIPPED} == fates(root)


def test_an_unknown_tensor_takes_no_memory():
    """A shape of a billion elements is no more work than one of four."""
    text = text_graph('node { name: "root" sequence { step { name: "s" model_name: "xlmr" } } }')
    text = text.replace("dims: [ 4 ] optional", "dims: [ -1 ] optional")
    start_s = time.process_time()
    root = explained(text, shapes=[("HINT", "1,1000000000")])
    assert ({"s": RUNS}, True) == (fates(root), time.process_time() - start_s < 5)
