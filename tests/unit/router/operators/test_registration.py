"""A kind of node is one module and one registration: the example of docs/extending.md, with a graph.proto for it."""

import re

import pytest
from tests.unit.docs.test_extending import PAGE, blocks, module
from tests.unit.router import make
from tests.unit.router.extended_proto import FieldProto, FileProto, add_field, add_message, message_of, messages
from tests.unit.router.fake_target import FakeTarget, answering
from tests.unit.router.graph_cases import World, compiled

from weft.base.core import CallContext
from weft.language import GraphError, GraphSource
from weft.language.compiler.nodes import NodeKind
from weft.language.compiler.scope import Scope
from weft.language.draw.build import build_diagram
from weft.language.draw.formats import render_text
from weft.language.path_form import PathForm
from weft.language.plan import GraphPlan, NodePlan
from weft.language.syntax import parse
from weft.router.bandits.store import bandit_choices
from weft.router.compile import check_graph
from weft.router.executor import GraphExecutor
from weft.router.operators import KINDS
from weft.router.reporting.path import PATH_HEADER, StepRecord
from weft.router.repository.serving import missing_call
from weft.router.runtime import Runtime
from weft_protos import graph_pb2


def rotation(file: FileProto) -> None:
    """Adds the example's kind to ``graph.proto``."""
    add_message(file, "Rotation")
    steps = add_field(file, "Rotation", "step", 1, "Step")
    steps.label = FieldProto.LABEL_REPEATED
    message_of(file, "Rotation").field.add(
        name="num_requests", number=2, label=FieldProto.LABEL_OPTIONAL, type=FieldProto.TYPE_UINT32
    )
    add_field(file, "Node", "rotation", 99, "Rotation").oneof_index = 0


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> NodeKind:
    """The example's kind, registered."""
    (code,) = blocks("A node kind", "python")
    kind = module(code, "rotation").RotationKind()
    monkeypatch.setattr(parse, "pb", messages("rotating", rotation))
    monkeypatch.setitem(KINDS, kind.name, kind)
    return kind


@pytest.fixture
def plan(kind: NodeKind) -> GraphPlan:
    """The example's graph."""
    (nodes,) = blocks("A node kind", "pbtxt")
    return compiled(nodes)


async def test_it_compiles_and_runs(plan: GraphPlan) -> None:
    """Two requests each, in turn; the path shows the step, and a reader of paths finds its way."""
    executor = GraphExecutor(plan, Runtime({"model": FakeTarget(a=answering(1), b=answering(2))}))
    answers, paths = [], []
    for _ in range(5):
        context = CallContext()
        answers.append((await make.run(executor, context=context)).outputs["Y"])
        paths.append(dict(context.trailing_metadata)[PATH_HEADER])
    assert [make.tensor(value) for value in (1, 1, 2, 2, 1)] == answers
    assert ["root|a|", "root|a|", "root|b|", "root|b|", "root|a|"] == paths
    assert [] == bandit_choices("root|b|", plan.root)


def test_it_is_drawn(plan: GraphPlan) -> None:
    """From its description alone."""
    drawing = render_text(build_diagram(plan))
    assert "[rotation]" in drawing
    assert "request: in turn" in drawing
    assert "2 requests each" in drawing


def test_it_is_ready_with_all_its_models(plan: GraphPlan) -> None:
    """A step without its model would be taken by some request."""
    missing = missing_call(plan.root, lambda call: call.model_name != "b")
    assert missing is not None
    assert "b" == missing.step.name


def test_it_nests_like_any_other(kind: NodeKind) -> None:
    """As a step of a sequence, its outputs joined by name, and in its own brackets in the path."""
    plan = compiled(
        'node { name: "root" sequence { step { name: "s" node: "turns" } } }'
        'node { name: "turns" rotation { step { name: "a" model_name: "a" } step { name: "b" model_name: "b" } } }'
    )
    assert "root/s/turns[b]" == plan.root.steps[0].action.steps[1].path


def test_its_files_are_checked(kind: NodeKind) -> None:
    """Fields of other kinds are refused; its own checks run; a file without a kind is told of it."""
    with pytest.raises(GraphError, match="'accept' has no effect in this rotation; it belongs to: cascade"):
        compiled('node { name: "root" rotation { step { name: "a" model_name: "a" accept: "true" } } }')
    with pytest.raises(GraphError, match=r"has no kind; give it a sequence, .* or rotation"):
        compiled('node { name: "root" }')
    node = 'node { name: "root" rotation { num_requests: 2 step { name: "a" model_name: "a" } } }'
    world = World([node])
    found = check_graph(GraphSource(world.graphs["g"], "graph.pbtxt"), world)
    assert ["'num_requests' has no effect where there is only one step to take"] == [one.message for one in found]


def test_every_kind_of_the_language_is_registered() -> None:
    """By the name of its field in graph.proto."""
    fields = graph_pb2.Node.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert {field.name for field in fields} == set(KINDS)


def test_what_a_kind_may_say_beside_is_there() -> None:
    """Every hook that the page names is one of its class, with words of its own there."""
    owners = {owner.__name__: owner for owner in (NodePlan, NodeKind, Scope, PathForm, StepRecord)}
    rows = re.findall(r"^\| (`\w+\.\w+`.*?) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)\.(\w+)`", row)]
    assert owners.keys() == {owner for owner, _ in named}
    assert [] == [pair for pair in named if not hasattr(owners[pair[0]], pair[1])]
