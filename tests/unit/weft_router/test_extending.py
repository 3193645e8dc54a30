"""The router's examples of docs/extending.md run as they stand there."""

from types import SimpleNamespace

import pytest
from tests.unit.docs.test_extending import blocks, module
from tests.unit.weft_router.text_graphs import compiled, x, y

from weft_router.combine import METHODS
from weft_router.graph import GraphError
from weft_router.kinds import describe


async def test_a_combine_method(make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with the method is checked, compiled, described and run; a field without effect is refused."""
    (code,), (line,) = blocks("A combine method", "python"), blocks("A combine method", "pbtxt")
    monkeypatch.setitem(METHODS, "MEDIAN", module(code, "range").RANGE)  # graph.proto has no RANGE
    combine = line.replace("RANGE", "MEDIAN").replace("SPREAD", "Y").replace("SCORE", "Y")
    steps = 'step { name: "a" model_name: "a" } step { name: "b" model_name: "b" }'
    nodes = f'node {{ name: "root" ensemble {{ {steps} {combine} }} }}'
    plan = compiled(nodes)
    assert ("Y: RANGE",) == describe(plan.root).exit.notes
    assert 2.5 == y(await make.run(plan, make.FakeTarget(a=make.answering(4.5), b=make.answering(7)), x()))
    with pytest.raises(GraphError, match="'weighted' has no effect with RANGE; it belongs to: AVERAGE or SUM or VOTE"):
        compiled(nodes.replace("method:", "weighted: true method:"))
