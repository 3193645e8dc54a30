"""Graphs that Triton Inference Server, KServe and Seldon Core publish, as shapes of our own, give the right answers."""

import asyncio
from pathlib import Path

import pytest
from tests.compat.graphs.run import SampleCore, SampleGraphs, answer, explained_calls, fault_of, started
from tests.compat.graphs.samples import FOLDER, README, SAMPLES, Sample, table
from tests.integration.routing import naming_service

from weft.language.draw import FORMATS
from weft.language.draw.build import build_diagram
from weft.router.compile import compile_graph
from weft.router.targets.grpc_target import GrpcTarget
from weft.router.targets.in_process import InProcessTarget

RUNNING = [pytest.param(sample, id=sample.file.rpartition(".")[0]) for sample in SAMPLES if not sample.refused]
REFUSED = [pytest.param(sample, id=sample.file.rpartition(".")[0]) for sample in SAMPLES if sample.refused]
#: Other numbers of rows, outputs left out, streams of streams, a cascade, a combiner, a choice.
OVER_A_WIRE = (
    "triton/guides/read_text.pbtxt",
    "triton/optional/left_out.pbtxt",
    "triton/streams/nested_square.pbtxt",
    "kserve/dog_breeds.yaml",
    "seldon1/combiner.yaml",
    "seldon2/one_of_two.yaml",
)


@pytest.mark.parametrize("sample", RUNNING)
async def test_a_published_graph_answers_as_expected(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real router, with every tensor, datatype, shape and response of the expected answer, and no more.

    The models that are called are those of which ``weft explain`` says so.
    """
    for folder in (tmp_path, tmp_path / sample.name):  # the labels of one of them
        folder.mkdir(exist_ok=True)
        (folder / "sums.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    models = SampleCore(sample)
    graphs = SampleGraphs(sample, models)
    found = graphs.faults_of(sample.name, models)
    assert [] == [fault.message for fault in found if fault.severity == "error"]
    assert not sample.note or any(sample.note in fault.message for fault in graphs.faults)
    assert sample.requests
    plan = compile_graph(graphs.find(sample.name, ""), models, graphs)
    assert all(form(build_diagram(plan)) for form in FORMATS.values())
    async with started(graphs, InProcessTarget("model", models), tmp_path) as core:
        for request in sample.requests:
            models.called.clear()
            got = await answer(core, sample.name, request)
            assert not fault_of(got, request)
            assert request.called in (None, models.called)
            called = set(models.called)
            may_be_called, are_called = await asyncio.to_thread(explained_calls, plan, request)
            assert called <= may_be_called
            assert isinstance(got, str) or called >= are_called


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample.file in OVER_A_WIRE], ids=lambda s: s.file)
async def test_a_published_graph_answers_over_a_wire(sample: Sample, tmp_path: Path) -> None:
    """The same where the models are behind a socket: every tensor, shape and response."""
    models = SampleCore(sample)
    graphs = SampleGraphs(sample, models)
    with naming_service(models) as address:
        async with started(graphs, GrpcTarget("model", address), tmp_path) as core:
            for request in sample.requests:
                assert not fault_of(await answer(core, sample.name, request), request)


@pytest.mark.parametrize("sample", REFUSED)
def test_a_published_graph_is_refused_with_a_reason(sample: Sample) -> None:
    """Those that are wrong on purpose, and those that ask for what there is not."""
    models = SampleCore(sample)
    found = SampleGraphs(sample, models).faults_of(sample.name, models)
    errors = [fault for fault in found if fault.severity == "error"]
    if sample.file.endswith(".pbtxt"):
        assert sample.refused.split() == sorted({fault.code for fault in errors})
    else:
        assert any(sample.refused in f"{fault.code} {fault.message}" for fault in errors)


def test_the_index_has_every_sample() -> None:
    """With what becomes of it; ``python -m tests.compat.graphs.samples`` writes it anew."""
    assert table() in README.read_text()


def test_every_file_belongs_to_a_sample() -> None:
    """Of its own, or of the one that names it."""
    files = [path for sample in SAMPLES for path in sample.paths]
    assert {path for path in FOLDER.rglob("*") if path.suffix in (".pbtxt", ".yaml")} == set(files)
