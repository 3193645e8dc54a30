"""Whether the graph of a job is still the same, while parts of its mesh come and go."""

import asyncio
from typing import Any

import pytest

from weft_common.errors import RemoteError
from weft_jobs.target import JobTarget
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

WHOLE = graph_pb.TargetSignaturesResponse(model=[graph_pb.ModelSignature(name="a"), graph_pb.ModelSignature(name="b")])
PART = graph_pb.TargetSignaturesResponse(
    model=[graph_pb.ModelSignature(name="a")], not_ready=["b/1 on model"], unreachable_target=["model (address)"]
)
OTHER = graph_pb.TargetSignaturesResponse(model=[graph_pb.ModelSignature(name="a"), graph_pb.ModelSignature(name="c")])


class _Mesh:
    """Answers with one thing after another, the last of them for ever; a status is an error."""

    def __init__(self, *answers: graph_pb.TargetSignaturesResponse | str) -> None:
        self._answers = list(answers)
        self.now_s = 0.0

    async def config(self, *_: Any, **__: Any) -> ModelConfig:
        return ModelConfig(name="graph")

    async def model_metadata(self, *_: Any, **__: Any) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(versions=["1"])

    async def target_signatures(self, **_: Any) -> graph_pb.TargetSignaturesResponse:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, str):
            raise RemoteError(answer, "away")
        return graph_pb.TargetSignaturesResponse.FromString(answer.SerializeToString())

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def _is_still(*answers: graph_pb.TargetSignaturesResponse | str) -> tuple[bool, float]:
    """Whether a graph that was there as a whole is the same, and how long it took to say, in seconds."""
    mesh = _Mesh(WHOLE, *answers)

    async def ask() -> bool:
        target = JobTarget(mesh, "graph", patience_s=60.0, clock_s=lambda: mesh.now_s, sleep=mesh.sleep)  # type: ignore[arg-type]
        return await target.is_still((await target.identify()).digest)

    return asyncio.run(ask()), mesh.now_s


def test_a_mesh_that_is_away_for_a_while_is_the_same() -> None:
    """A router that starts, a graph it does not know yet, and models that are not ready are waited for."""
    assert _is_still(WHOLE) == (True, 0.0)
    same, duration_s = _is_still("UNAVAILABLE", "NOT_FOUND", PART, PART, "DEADLINE_EXCEEDED", WHOLE)
    assert same
    assert 0.0 < duration_s < 10.0


def test_another_model_is_found_at_once() -> None:
    """Where all that is known is there, waiting would not change it."""
    assert _is_still(OTHER) == (False, 0.0)
    assert not _is_still(PART, OTHER)[0]


def test_patience_ends() -> None:
    """A part of the mesh that stays away, or a server that does, ends the wait."""
    same, duration_s = _is_still(PART)
    assert not same
    assert 60.0 < duration_s < 65.0
    with pytest.raises(RemoteError, match="away"):
        _is_still("UNAVAILABLE")
    with pytest.raises(RemoteError, match="away"):
        _is_still("PERMISSION_DENIED")
