"""Replicas that are killed while they work, with no policy written: what is lost, and what is never sent again."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.integration.fleet import CONFIG, MODEL, Load, Service, router_over, services, write_repository
from tests.integration.routing import Router
from tests.messages import request_from_call

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

RETRY = 'parameters { key: "retry" value { string_value: "once" } }'
#: A request with a number below 0 ends the process that executes it.
POISON = "        if any((a < 0).any() for a in arrays):\n            os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_repository(tmp_path_factory.mktemp("lost"))
    folder = root / "model" / "work"
    before, rest = MODEL.split("        return [")
    source = before.replace("import time", "import os\nimport signal\nimport time") + POISON + "        return [" + rest
    (folder / "1" / "model.py").write_text(source)
    (folder / "config.pbtxt").write_text(CONFIG + RETRY)
    return root


@pytest.fixture
def replicas(repository: Path) -> Iterator[list[Service]]:
    with services(repository, 3) as started:
        yield started


@pytest.fixture
def router(repository: Path, replicas: list[Service]) -> Iterator[Router]:
    with router_over(repository, ",".join(replica.address for replica in replicas)) as running:
        yield running


async def test_kills_cost_no_request_where_the_model_allows_a_retry(router: Router, replicas: list[Service]) -> None:
    """Of a graph without policies: what was in work at a killed replica is answered by another."""
    async with Load(router.grpc, "plain") as load:
        for replica in replicas:
            await load.answered(200)
            await asyncio.to_thread(replica.end, signal.SIGKILL)
            await load.answered(200)
            await asyncio.to_thread(replica.start)
    assert ({"OK"}, 0, []) == (set(load.outcomes), load.wrong, load.errors)
    samples = await asyncio.to_thread(router.scrape)
    assert samples['weft_target_repeated_calls_total{target="model"}'] > 0, "no call was in work at a killed replica"


async def test_a_request_that_ends_two_replicas_reaches_no_third(router: Router, replicas: list[Service]) -> None:
    """It fails, and the third goes on."""
    call = InferCall("plain", inputs={"X": encode(np.array([[-1.0]], np.float32))})
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be reached") as caught:
            await stub.ModelInfer(request_from_call(call), timeout=20)
        assert grpc.StatusCode.UNAVAILABLE is caught.value.code()
        alive = [one for one in replicas if one.process is not None and one.process.poll() is None]
        assert 1 == len(alive)
        call.inputs["X"] = encode(np.array([[1.0]], np.float32))
        await stub.ModelInfer(request_from_call(call), timeout=20)
