"""Graphs that Triton Inference Server, KServe and Seldon Core publish, as shapes of our own, give the right answers."""

import asyncio
from pathlib import Path

import pytest
from tests.compat.graphs.all_shapes import SHAPES
from tests.compat.graphs.explained import explained_calls
from tests.compat.graphs.fake_models import SampleTarget
from tests.compat.graphs.index import README, table
from tests.compat.graphs.run import SampleGraphs, answer, difference, started
from tests.compat.graphs.shape import FOLDER, Shape

from weft.router.compile import compile_graph
from weft.tools.draw import FORMATS
from weft.tools.draw.build import build_diagram


def _parameters(*, is_refused: bool) -> list[object]:
    return [
        pytest.param(shape, id=shape.file.rpartition(".")[0]) for shape in SHAPES if bool(shape.refused) is is_refused
    ]


@pytest.mark.parametrize("shape", _parameters(is_refused=False))
async def test_a_published_graph_answers_as_expected(shape: Shape, tmp_path: Path) -> None:
    """In a real router, with every tensor, datatype, shape and response of the expected answer, and no more.

    The models that are called are those of which ``weft explain`` says so.
    """
    target = SampleTarget(shape)
    graphs = SampleGraphs(shape, target)
    found = graphs.faults_of(shape.name, target)
    assert [] == [fault.message for fault in found if fault.severity == "error"]
    assert not shape.check or any(shape.check in fault.message for fault in graphs.faults)
    assert shape.requests
    plan = compile_graph(graphs.find(shape.name, ""), target, graphs)
    assert all(form(build_diagram(plan)) for form in FORMATS.values())
    async with started(shape, tmp_path) as (core, served):
        for request in shape.requests:
            served.called.clear()
            got = await answer(core, shape.name, request)
            if request.error:
                assert isinstance(got, str)
                assert request.error in got
            else:
                assert not difference(got, request.expected, is_any_order=request.is_any_order)
            assert request.called in (None, served.called)
            called = set(served.called)
            may_be_called, are_called = await asyncio.to_thread(explained_calls, plan, request)
            assert called <= may_be_called
            assert isinstance(got, str) or called >= are_called


@pytest.mark.parametrize("shape", _parameters(is_refused=True))
def test_a_published_graph_is_refused_with_a_reason(shape: Shape) -> None:
    """Those that are wrong on purpose, and those that ask for what there is not."""
    target = SampleTarget(shape)
    found = SampleGraphs(shape, target).faults_of(shape.name, target)
    errors = [fault for fault in found if fault.severity == "error"]
    if shape.file.endswith(".pbtxt"):
        assert shape.refused.split() == sorted({fault.code for fault in errors})
    else:
        assert any(shape.refused in f"{fault.code} {fault.message}" for fault in errors)


def test_the_index_has_every_sample() -> None:
    """With what becomes of it; ``python -m tests.compat.graphs.index`` writes it anew."""
    assert table() in README.read_text()


def test_every_file_belongs_to_a_sample() -> None:
    """And no two samples are of one file."""
    files = [path for shape in SHAPES for path in shape.paths]
    assert {path for path in FOLDER.rglob("*") if path.suffix in (".pbtxt", ".yaml")} == set(files)
    assert len({shape.file for shape in SHAPES}) == len(SHAPES)
