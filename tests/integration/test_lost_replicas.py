"""Replicas that are killed while they work, with no policy written: what is lost, and what is never sent again."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.integration.fleet import MODEL, Load, Service, router_over, services, write_repository
from tests.messages import request_from_call
from tests.processes import Running, wait_until
from tests.repositories import NUMBER_BATCHES, NUMBERS

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
    (folder / "config.pbtxt").write_text(f'backend: "python" {NUMBER_BATCHES}{RETRY}')
    return root


@pytest.fixture
def replicas(repository: Path) -> Iterator[list[Service]]:
    with services(repository, 3) as started:
        yield started


@pytest.fixture
def router(repository: Path, replicas: list[Service]) -> Iterator[Running]:
    with router_over(repository, ",".join(replica.address for replica in replicas)) as running:
        yield running


async def test_kills_cost_no_request_where_the_model_allows_a_retry(router: Running, replicas: list[Service]) -> None:
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


async def test_a_request_that_ends_two_replicas_reaches_no_third(router: Running, replicas: list[Service]) -> None:
    """It fails, and the third goes on."""
    call = InferCall("plain", inputs={"X": encode(np.array([[-1.0]], np.float32))})
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be reached") as caught:
            await stub.ModelInfer(request_from_call(call), timeout=20)
        assert grpc.StatusCode.UNAVAILABLE is caught.value.code()
        running = [one.process for one in replicas if one.process is not None]
        wait_until(lambda: 1 == sum(one.poll() is None for one in running))  # connections end before their process
        call.inputs["X"] = encode(np.array([[1.0]], np.float32))
        await stub.ModelInfer(request_from_call(call), timeout=20)


#: How often a replica is killed, and of how many requests none is lost.
KILL_PERIOD_S, NUM_REQUESTS = 2.0, 20_000


@pytest.mark.long
async def test_kills_every_two_seconds_cost_no_request(tmp_path: Path) -> None:
    """20,000 requests of an ONNX model, with nothing written in model or graph, over two replicas that die in turn."""
    root = write_repository(tmp_path)
    folder = root / "model" / "work"
    (folder / "1" / "model.py").unlink()
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1]) for name in ("X", "Y")]
    one = helper.make_tensor("ONE", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph([helper.make_node("Add", ["X", "ONE"], ["Y"])], "work", tensors[:1], tensors[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime" {NUMBERS} max_batch_size: 8')
    num_kills = 0
    with services(root, 2) as pair, router_over(root, ",".join(one.address for one in pair)) as over:
        async with Load(over.grpc, "plain") as load:
            while load.outcomes.total() < NUM_REQUESTS:
                await asyncio.sleep(KILL_PERIOD_S)
                replica = pair[num_kills % 2]
                await asyncio.to_thread(replica.end, signal.SIGKILL)
                await asyncio.to_thread(replica.start)
                num_kills += 1
        assert ({"OK"}, 0, []) == (set(load.outcomes), load.wrong, load.errors), load.outcomes
    assert num_kills > 2
