"""Graphs and ensembles that stream, as steps of others."""

from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.stream_targets import (
    StreamModels,
    collected,
    compiled,
    counting,
    numbers,
    stream_of,
    stream_target,
)

from weft.base.core import CallContext
from weft.language import GraphSource
from weft.language.plan import GraphPlan
from weft.router.compile import check_graph, compile_graph

TENSORS = """input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]"""


def ensemble(name: str, *steps: tuple[str, str, str], more: str = "") -> str:
    """An ensemble of Triton Inference Server: (model, tensor that it takes, tensor that it gives)."""
    listed = ", ".join(
        f"""{{ model_name: "{model}" model_version: -1 input_map {{ key: "IN" value: "{taken}" }}
          output_map {{ key: "OUT" value: "{given}" }} }}"""
        for model, taken, given in steps
    )
    return f'name: "{name}" platform: "ensemble" {TENSORS} ensemble_scheduling {{ {more} step [ {listed} ] }}'


class Models(StreamModels):
    """All but the graphs; `add` takes B as well."""

    def find(self, model_name: str, version: str) -> Any:
        """As ``Catalog.find``."""
        if model_name == "chat":
            return None
        return (
            ("model", make.signature("add", ["IN", "B"])) if model_name == "add" else super().find(model_name, version)
        )


class Graphs:
    """Graphs by name, in version 1."""

    def __init__(self, **texts: str) -> None:
        self._texts = texts

    def find(self, name: str, version: str) -> GraphSource | None:
        """As ``GraphLookup.find``."""
        text = self._texts.get(name)
        return None if text is None else GraphSource(text, f"{name}.pbtxt", name, "1")

    def names(self) -> list[str]:
        """As ``GraphLookup.names``."""
        return list(self._texts)


@pytest.fixture
def target() -> Any:
    target = stream_target()
    target.streams["a"] = counting(3)
    return target


INNER = ensemble("chat", ("pre", "IN", "p"), ("a", "p", "t"), ("post", "t", "OUT"), more="max_inflight_requests: 2")


async def outcome(plan: GraphPlan, target: Any) -> tuple[list[float | None], list[bool], str]:
    """Values, final flags, and the path."""
    context = CallContext()
    got, error = await collected(stream_of(plan, target, context=context))
    assert (None, 0, 0) == (error, target.num_open, make.num_other_tasks())
    return numbers(got, "OUT"), [one.is_final for one in got], dict(context.trailing_metadata)["x-graph-path"]


async def test_an_ensemble_inside_an_ensemble_streams(target: Any) -> None:
    """As on Triton Inference Server the outer one is decoupled too, whether it says so or not."""
    outer = ensemble("outer", ("first", "IN", "x"), ("chat", "x", "y"), ("last", "y", "OUT"))
    for declared in ("", "decoupled: true", "decoupled: false"):
        text = f"{outer} model_transaction_policy {{ {declared} }}"
        plan = compile_graph(GraphSource(text, "outer.pbtxt"), Models(), Graphs(chat=INNER))
        values, finals, path = await outcome(plan, target)
        assert ([1, 2, 3], [False, False, True], True) == (values, finals, plan.signature.is_decoupled)
        assert "root.first;chat=root(pre;a;post);last" == path


async def test_an_import_of_a_graph_that_streams(target: Any) -> None:
    """In a branch of a switch; its own limits hold there."""
    text = """import { graph: "chat" version: 1 as: "talk" }
      node { name: "root" switch { step { name: "t" otherwise: true graph: "talk" } } }"""
    assert ([1, 2, 3], [False, False, True], "root[t=root(pre;a;post)]") == await outcome(
        compiled(text, Graphs(chat=INNER)), target
    )


def test_labels_of_nested_ensembles_follow_the_rule_of_triton() -> None:
    """A step that reads from an ensemble that streams and from something else is refused, in its words."""
    outer = ensemble("outer", ("chat", "IN", "x"), ("one", "IN", "y"), ("add", "x", "OUT"))
    both = 'input_map [ { key: "IN" value: "x" }, { key: "B" value: "y" } ]'
    outer = outer.replace('input_map { key: "IN" value: "x" }', both)
    (fault,) = check_graph(GraphSource(outer, "outer.pbtxt"), Models(), Graphs(chat=INNER))
    assert ("G019", True) == (fault.code, "receives inputs originated from different decoupled models" in fault.message)
