"""Thousands of requests and streams that are given up at random moments leave nothing behind."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tests.unit.router import make
from tests.unit.router.stream_targets import stream_target

from weft.base.caching import SingleFlight
from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError, WeftError
from weft.router.admission.concurrency_limit import InflightLimit
from weft.router.core import RouterCore
from weft.router.repository.config import config_of_signature
from weft.router.target import TargetModel

NUM_REQUESTS = 800
NUM_CLIENTS = 16
#: Turns of the event loop; a whole request takes about 60.
MAX_TURNS = 80

HEADER = """name: "NAME" platform: "graph"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
GRAPHS = {
    "chat": """policy { max_inflight: 12 } node { name: "root" sequence { max_inflight_responses: 3
      step { name: "pre" model_name: "quick" output_map { key: "OUT" value: "P" } policy { cache { ttl_ms: 1 } } }
      step { name: "llm" model_name: "stream" input_map { key: "IN" value: "P" }
             output_map { key: "OUT" value: "T" } policy { max_inflight: 9 retry { attempts: 2 } } }
      step { name: "more" model_name: "stream" input_map { key: "IN" value: "T" }
             output_map { key: "OUT" value: "U" } dependency: SOFT default { output: "U" number: 1 dims: [ 1 ] } }
      step { name: "post" model_name: "slow" input_map { key: "IN" value: "U" } fallback { model_name: "quick" }
             policy { hedge { after_ms: 1 } timeout_ms: 50 } }
      step { name: "new" model_name: "slow" input_map { key: "IN" value: "T" } shadow { percent: 50 } } } }""",
    "inside": """node { name: "root" sequence { max_inflight_responses: 2
      step { name: "both" node: "both" policy { max_inflight: 9 retry { attempts: 2 } }
             output_map { key: "OUT" value: "T" } }
      step { name: "post" model_name: "slow" input_map { key: "IN" value: "T" } }
      step { name: "new" node: "chat" shadow { percent: 30 } } } }
    node { name: "both" ensemble { combine { output: "OUT" method: MERGE }
      step { name: "chat" node: "chat" dependency: SOFT }
      step { name: "first" node: "first" policy { hedge { after_ms: 1 } } } } }
    node { name: "first" ensemble { combine { output: "OUT" method: FIRST }
      step { name: "a" model_name: "stream" } step { name: "b" model_name: "flaky" }
      step { name: "c" node: "unsure" } } }
    node { name: "unsure" cascade { step { name: "s" model_name: "stream" accept: 'outputs.OUT[0] > 1.0' }
      step { name: "q" model_name: "flaky" fallback { model_name: "stream" } dependency: SOFT } } }
    node { name: "chat" policy { max_inflight: 20 } sequence {
      step { name: "llm" model_name: "stream" output_map { key: "OUT" value: "T" } policy { max_inflight: 20 } }
      step { name: "post" model_name: "slow" input_map { key: "IN" value: "T" } } } }""",
    "kept": """policy { cache { ttl_ms: 1 } } node { name: "root" sequence { step { node: "vote" } } }
    node { name: "vote" ensemble { combine { output: "OUT" method: FIRST }
      step { name: "a" model_name: "slow" policy { cache { ttl_ms: 1 } } }
      step { name: "b" model_name: "flaky" policy { retry { attempts: 3 } } }
      step { name: "new" model_name: "slow" shadow { percent: 50 max_inflight: 3 } } } }""",
}


def target_of(generator: random.Random) -> Any:
    """Models that answer after some turns of the loop, and some that do not."""
    target = stream_target()

    async def turns() -> None:
        for _ in range(generator.randrange(8)):
            await asyncio.sleep(0)

    async def slow(call: InferCall, context: CallContext) -> dict[str, Any]:
        await turns()
        return {"OUT": call.inputs["IN"]}

    async def flaky(call: InferCall, context: CallContext) -> dict[str, Any]:
        await turns()
        if generator.random() < 0.5:
            raise RemoteError("UNAVAILABLE", "gone")
        return {"OUT": call.inputs["IN"]}

    async def stream(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for _ in range(generator.randrange(5)):
            await turns()
            if generator.random() < 0.05:
                raise RemoteError("UNAVAILABLE", "gone")
            yield make.tensor(generator.randrange(3))

    target.answers |= {"slow": slow, "flaky": flaky}
    target.streams["stream"] = stream
    for name in ("quick", "slow", "flaky", "stream"):
        known = make.signature(name, ["IN"], ["OUT"])
        config = config_of_signature(known)
        config.model_transaction_policy.decoupled = name == "stream"
        target.models.append(TargetModel(known.from_config(config, "1"), True, config))
    return target


async def send(core: RouterCore, generator: random.Random) -> None:
    """One request, which may be left after some responses."""
    name = generator.choice(["chat", "kept", "stream"])
    call = InferCall(name, inputs={"IN": make.tensor(generator.randrange(3))})
    num_taken = generator.randrange(6)
    async with aclosing(core.stream_infer(call, CallContext())) as results:
        async for _ in results:
            num_taken -= 1
            if num_taken < 0:
                return


async def client(core: RouterCore, generator: random.Random, outcomes: list[str]) -> None:
    """Sends its share of the requests one after another, and cancels half of them at a random moment."""
    for _ in range(NUM_REQUESTS // NUM_CLIENTS):
        request = asyncio.create_task(send(core, generator))
        if generator.random() < 0.5:
            for _ in range(generator.randrange(MAX_TURNS)):
                await asyncio.sleep(0)
            request.cancel()
        try:
            await request
            outcomes.append("OK")
        except asyncio.CancelledError:
            outcomes.append("CANCELLED")
        except WeftError as error:
            outcomes.append(error.code)


async def test_requests_that_are_given_up_leave_nothing(tmp_path: Path) -> None:
    """No task, no call, no shadow; every limit is free again, and nobody waits for an answer on its way."""
    generator = random.Random(20261121)
    for name, body in GRAPHS.items():
        make.write(tmp_path, HEADER.replace("NAME", name) + body, name)
    target = target_of(generator)
    async with make.started(tmp_path, target) as started:
        core = started.core
        assert core.is_ready(), core.index(ready_only=False)
        num_tasks = make.num_other_tasks()
        outcomes: list[str] = []
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(client(core, generator, outcomes))
        assert NUM_REQUESTS == len(outcomes)
        assert (
            {"OK", "CANCELLED", "UNAVAILABLE"}
            <= set(outcomes)
            <= {"OK", "CANCELLED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}
        )
        assert NUM_REQUESTS // 20 < outcomes.count("CANCELLED")
        async with asyncio.timeout(5):
            while core._runtime.shadows.num_inflight:  # noqa: ASYNC110  # nobody else waits for a shadow
                await asyncio.sleep(0)
        assert (0, num_tasks) == (target.num_open, make.num_other_tasks())
        gc.collect()
        everything = gc.get_objects()  # some lie about their class, and torch's warn when they are asked
        assert {0} == {one.num_flights for one in everything if type(one) is SingleFlight}
        assert {0} == {one.num_inflight for one in everything if type(one) is InflightLimit}
