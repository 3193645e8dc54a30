"""What every kind says of its nodes, for drawings and explanations."""

from collections.abc import Iterator

import pytest
from tests.unit.language.conftest import FOLDER, FakeCatalog, FolderGraphs

from weft.language import GraphSource
from weft.language.plan import NodePlan, steps_of
from weft.router.compile import compile_graph
from weft.router.operators import KINDS

GOOD = sorted((FOLDER / "good").glob("*.pbtxt"))


def nodes(plan: NodePlan) -> Iterator[NodePlan]:
    """A node and all within it."""
    yield plan
    yield from (step.action for _, step in steps_of(plan) if isinstance(step.action, NodePlan))


def described() -> list[NodePlan]:
    """Every node of the good graphs."""
    sources = [GraphSource(file.read_text(), file.name) for file in GOOD]
    plans = [compile_graph(source, FakeCatalog(), FolderGraphs()) for source in sources]
    return [node for plan in plans for node in nodes(plan.root)]


NODES = described()


def test_the_graphs_have_every_kind() -> None:
    """So that what is said below is said of each."""
    assert set(KINDS) == {node.kind for node in NODES}


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.path)
def test_every_step_is_reached_and_left(node: NodePlan) -> None:
    """A flow leads to each step that is described; an answer, or a tensor, of each but shadows goes on."""
    description = node.describe()
    steps = (*node.steps, *node.shadows, *node.customs)
    assert list(steps) == list(description.steps)
    assert set(range(len(steps))) == {flow.target for flow in description.flows if flow.target is not None}
    silent = {i for i, step in enumerate(steps) if step.shadow is not None or not step.outputs}
    assert set(range(len(steps))) - silent <= {flow.source for flow in description.flows}


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.path)
def test_flows_have_no_cycle_and_lead_out(node: NodePlan) -> None:
    """But for the way back of a loop."""
    flows = [flow for flow in node.describe().flows if not flow.is_back]
    left = {flow.target: None for flow in flows if flow.target is not None}
    while left:
        ready = [i for i in left if not any(flow.target == i and flow.source in left for flow in flows)]
        assert ready
        for i in ready:
            del left[i]
    assert any(flow.target is None for flow in flows)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.path)
def test_tensors_are_named_by_who_gives_and_takes_them(node: NodePlan) -> None:
    """As the targets of these steps call them."""
    description = node.describe()
    for flow in description.flows:
        for use in flow.tensors:
            if use.given_as and flow.source is not None:
                assert (use.given_as, use.slot) in description.steps[flow.source].outputs
            assert use.slot in node.specs
