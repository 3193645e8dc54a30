"""Whether the graph of a job is still the same, while parts of its mesh come and go."""

import asyncio
from typing import Any

import pytest

from weft.base.errors import RemoteError
from weft.base.signature import GRAPH_DIGEST_PARAMETER
from weft.jobs.target import JobTarget
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelParameter

WHOLE, OTHER = (
    ModelConfig(name="graph", parameters={GRAPH_DIGEST_PARAMETER: ModelParameter(string_value=digest)})
    for digest in "ab"
)
SCALED = ModelConfig(name="graph", parameters=WHOLE.parameters, instance_group=[ModelInstanceGroup(count=4)])


class _Mesh:
    """Answers with one thing after another, the last of them for ever; a status is an error."""

    def __init__(self, *answers: ModelConfig | str) -> None:
        self._answers = list(answers)
        self.now_s = 0.0

    async def config(self, *_: Any, **__: Any) -> ModelConfig:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, str):
            raise RemoteError(answer, "away")
        return answer

    async def model_metadata(self, *_: Any, **__: Any) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(versions=["1"])

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def _is_still(*answers: ModelConfig | str) -> tuple[bool, float]:
    """Whether a graph that was there as a whole is the same, and how long it took to say, in seconds."""
    mesh = _Mesh(WHOLE, *answers)

    async def ask() -> bool:
        target = JobTarget(mesh, "graph", patience_s=60.0, clock_s=lambda: mesh.now_s, sleep=mesh.sleep)  # type: ignore[arg-type]
        return await target.is_still((await target.identify()).digest)

    return asyncio.run(ask()), mesh.now_s


def test_a_mesh_that_is_away_for_a_while_is_the_same() -> None:
    """A router that starts and a graph it does not know yet are waited for."""
    assert _is_still(WHOLE) == (True, 0.0)
    same, duration_s = _is_still("UNAVAILABLE", "NOT_FOUND", "DEADLINE_EXCEEDED", WHOLE)
    assert same
    assert 0.0 < duration_s < 10.0


def test_another_graph_is_found_at_once() -> None:
    """Also after the mesh was away. How requests are scheduled says nothing of the answers."""
    assert _is_still(OTHER) == (False, 0.0)
    assert not _is_still("UNAVAILABLE", OTHER)[0]
    assert _is_still(SCALED) == (True, 0.0)


def test_patience_ends() -> None:
    """A server that stays away ends the wait."""
    with pytest.raises(RemoteError, match="away"):
        _is_still("UNAVAILABLE")
    with pytest.raises(RemoteError, match="away"):
        _is_still("PERMISSION_DENIED")
