"""The sample mesh with every service in the router's process, beside the one of four processes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from examples.demo import Question, questions
from tests.integration.test_samples import infer
from tritonclient import grpc as triton

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh

DIGIT = min((Path(__file__).resolve().parents[2] / "model_repository" / "data" / "digits").glob("*.png"))


@pytest.fixture(scope="module")
def fused(repository: Path) -> Iterator[triton.InferenceServerClient]:
    """A tritonclient on the fused mesh."""
    with running_mesh(repository, ["--in-process"]) as endpoints:
        assert 1 == len({endpoint.pid for endpoint in endpoints.values()})
        with triton.InferenceServerClient(endpoints["router"].grpc) as connected:
            yield connected


@pytest.mark.parametrize("question", questions(DIGIT), ids=lambda question: question.graph)
def test_every_graph_answers_as_in_processes_of_its_own(
    question: Question, client: triton.InferenceServerClient, fused: triton.InferenceServerClient
) -> None:
    """The answer, the path and the models that the demo sees are the same, bit for bit where no choice is by chance."""
    options = {"parameters": {"graph_trace": True, **question.parameters}, "headers": dict(question.headers)}
    separate, together = (infer(each, question.graph, dict(question.inputs), **options) for each in (client, fused))
    names = [output.name for output in separate.get_response().outputs]
    assert names == [output.name for output in together.get_response().outputs]
    calls = [
        [(step["path"], step["model"], step["target"], step["status"]) for step in json.loads(text) if step["model"]]
        for text in (result.get_response().parameters["graph_trace"].string_param for result in (separate, together))
    ]
    if calls[0] != calls[1]:
        assert "digits_ab" == question.graph, "only this one draws a variant"
        return
    for name in names:
        expected, got = separate.as_numpy(name), together.as_numpy(name)
        if expected.dtype == np.float32:  # other texts in a batch move the last bits
            np.testing.assert_allclose(expected, got, rtol=1e-4, atol=1e-6)
        else:
            assert expected.tolist() == got.tolist()


def test_every_model_is_told_of_as_in_processes_of_its_own(
    mesh: Mapping[str, Endpoint], client: triton.InferenceServerClient, fused: triton.InferenceServerClient
) -> None:
    """Index, configurations and metadata that the router gives are the same."""
    separate, together = (
        {(model.name, model.version): model.state for model in each.get_model_repository_index().models}
        for each in (client, fused)
    )
    assert separate == together
    for name, version in separate:
        assert client.get_model_config(name, version) == fused.get_model_config(name, version)
        assert client.get_model_metadata(name, version) == fused.get_model_metadata(name, version)
