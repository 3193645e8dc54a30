"""Graphs that are reloaded, unloaded and rolled back while clients use them: a real router over real sockets."""

import asyncio
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.routing import MODELS, NamingCore, graph, message, naming_service, running_router, write
from tests.processes import Running

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import split_bytes
from weft.jobs.batch import BatchOptions, run_batch
from weft.v2.client.channels import channel_options
from weft.v2.client.v2_client import V2Client
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_protos.model_config_pb2 import ModelConfig

NUM_CLIENTS = 4
TIMEOUT_S = 30.0
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.02")
FAILURES = 'weft_graph_load_failures_total{graph="named",version="1"}'


def named(model: str) -> str:
    """Four steps one after another, all of one model and named after it; the answer has what each of them said."""
    names = ["X", "T0", "T1", "T2", "ANSWER"]
    steps = "".join(
        f'step {{ name: "{model}_{i}" model_name: "{model}" input_map {{ key: "X" value: "{names[i]}" }} '
        f'output_map {{ key: "NAME" value: "{names[i + 1]}" }} }}\n'
        for i in range(4)
    )
    return graph("named", f"sequence {{ {steps} }}", tensors="X ANSWER")


BAD = named("alpha").replace('model_name: "alpha"', 'model_name: "nobody"')


def told(response: pb.ModelInferResponse, path: str) -> str:
    """Model and version that a response tells of; fails unless answer, path and version tell of one and the same."""
    (answer,) = split_bytes(response.raw_output_contents[0])
    said = answer.decode().split(",")[1:]
    taken = re.findall(r"(\w+)_\d", path)
    assert 4 == len(said) == len(taken)
    assert {said[0]} == set(said) == set(taken)
    return f"{said[0]}/{response.model_version}"


class Clients:
    """Clients that send one request after another; counts what answered, keeps every failure."""

    def __init__(self, stub: Any) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[grpc.aio.AioRpcError] = []
        self.is_stopped = False
        self._stub = stub
        self._answered = asyncio.Condition()

    async def run(self) -> None:
        while not self.is_stopped:
            call = self._stub.ModelInfer(message("named"), timeout=TIMEOUT_S)
            try:
                response = await call
                trailer = dict(await call.trailing_metadata())
                self.answers[told(response, trailer["x-graph-path"])] += 1
            except grpc.aio.AioRpcError as error:
                self.failures.append(error)
            async with self._answered:
                self._answered.notify_all()

    async def until(self, claim: Callable[[], bool]) -> None:
        """Return when a claim about the answers holds; it is asked again after every answer."""
        async with asyncio.timeout(TIMEOUT_S), self._answered:
            await self._answered.wait_for(claim)

    async def until_answered_by(self, name: str) -> None:
        """Return when all of so many answers in a row are of ``name`` that no client waits for another any more."""
        await self.until(lambda number=self.answers[name]: self.answers[name] > number)
        others = self.answers.total() - self.answers[name]
        await self.until(lambda number=self.answers[name]: self.answers[name] >= number + NUM_CLIENTS)
        assert self.answers.total() - self.answers[name] < others + NUM_CLIENTS


@asynccontextmanager
async def stub_of(router: Running) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(router.grpc, options=channel_options()) as channel:
        yield GRPCInferenceServiceStub(channel)


@asynccontextmanager
async def clients_of(router: Running) -> AsyncIterator[tuple[Any, Clients]]:
    """A stub, and clients that hammer the router until the block is left."""
    async with stub_of(router) as stub:
        clients = Clients(stub)
        running = [asyncio.create_task(clients.run()) for _ in range(NUM_CLIENTS)]
        try:
            yield stub, clients
        finally:
            clients.is_stopped = True
            await asyncio.gather(*running)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Address of the models."""
    with naming_service() as address:
        yield address


async def load(stub: Any, *, rollback: bool = False) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="named")
    if rollback:
        request.parameters["rollback"].bool_param = True
    await stub.RepositoryModelLoad(request, timeout=TIMEOUT_S)


async def unload(stub: Any) -> None:
    await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="named"), timeout=TIMEOUT_S)


async def index_of(stub: Any) -> dict[str, tuple[str, str]]:
    """State and reason of each version of the graph."""
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=TIMEOUT_S)
    return {entry.version: (entry.state, entry.reason) for entry in index.models if entry.name == "named"}


async def until_index(stub: Any, version: str, state: str, reason: str) -> None:
    """Return when the index has this state of a version, and a reason with this text."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = (await index_of(stub)).get(version, ("gone", ""))
            if found[0] == state and reason in found[1] and bool(reason) == bool(found[1]):
                return
            await asyncio.sleep(0.005)


async def test_no_request_is_lost_while_a_graph_is_reloaded(target: str, tmp_path: Path) -> None:
    """Changed files, added and removed versions, bad files and rollbacks: each answer is one version's alone."""
    write(tmp_path, named("alpha"), "named")
    with running_router(tmp_path, target, EXPLICIT) as router:
        async with clients_of(router) as (stub, clients):
            await clients.until_answered_by("alpha/1")
            for _ in range(3):
                write(tmp_path, named("beta"), "named")
                await load(stub)
                await clients.until_answered_by("beta/1")
                write(tmp_path, BAD, "named")
                with pytest.raises(grpc.aio.AioRpcError, match="nobody"):
                    await load(stub)
                state, reason = (await index_of(stub))["1"]
                assert "READY" == state
                assert "reload failed: " in reason
                assert "unknown model 'nobody'" in reason
                await clients.until_answered_by("beta/1")
                await load(stub, rollback=True)
                await clients.until_answered_by("alpha/1")
                write(tmp_path, named("alpha"), "named")
                write(tmp_path, named("gamma"), "named", version=2)
                await load(stub)
                await clients.until_answered_by("gamma/2")
                write(tmp_path, named("delta"), "named", version=2)
                await load(stub)
                await clients.until_answered_by("delta/2")
                await load(stub, rollback=True)
                await clients.until_answered_by("gamma/2")
                shutil.rmtree(tmp_path / "named/2")
                await load(stub)
                await clients.until_answered_by("alpha/1")
        assert 3.0 == router.scrape()[FAILURES]
    assert [] == [error.details() for error in clients.failures]
    assert {"alpha/1", "beta/1", "gamma/2", "delta/2"} == set(clients.answers)


async def test_loads_at_the_same_time_end_in_what_the_file_says(target: str, tmp_path: Path) -> None:
    """Each of them has ended well, and none has left the graph in between."""
    write(tmp_path, named("alpha"), "named")
    with running_router(tmp_path, target, EXPLICIT) as router:
        async with clients_of(router) as (stub, clients):
            for model in ("beta", "gamma", "alpha"):
                write(tmp_path, named(model), "named")
                await asyncio.gather(*(load(stub) for _ in range(10)))
                assert {"1": ("READY", "")} == await index_of(stub)
                await clients.until_answered_by(f"{model}/1")
        assert 0.0 == router.scrape()[FAILURES]
    assert [] == [error.details() for error in clients.failures]


async def test_while_a_graph_is_unloaded_every_request_gets_an_answer(target: str, tmp_path: Path) -> None:
    """What came before is answered; the others are told that it is unloaded, and nothing else."""
    write(tmp_path, named("alpha"), "named")
    with running_router(tmp_path, target, EXPLICIT) as router:
        async with clients_of(router) as (stub, clients):
            for model in ("alpha", "beta", "alpha"):
                write(tmp_path, named(model), "named")
                await load(stub)
                await clients.until_answered_by(f"{model}/1")
                num_failures = len(clients.failures)
                await unload(stub)
                await clients.until(lambda expected=num_failures + NUM_CLIENTS: len(clients.failures) >= expected)
        assert not [key for key in router.scrape() if 'graph="named"' in key or 'model="named"' in key]
    expected = (grpc.StatusCode.UNAVAILABLE, "graph 'named' version 1 is not at ready state: unloaded")
    assert {expected} == {(error.code(), error.details()) for error in clients.failures}


async def test_a_request_in_flight_ends_in_the_graph_in_which_it_began(tmp_path: Path) -> None:
    """Unloaded, removed and replaced meanwhile."""
    core = NamingCore()
    core.held = "alpha"
    write(tmp_path, named("alpha"), "named")
    with naming_service(core) as target, running_router(tmp_path, target, EXPLICIT) as router:
        async with stub_of(router) as stub:
            for change in (unload, load):
                core.is_holding.clear()
                core.is_released.clear()
                write(tmp_path, named("alpha"), "named")
                await load(stub)
                call = stub.ModelInfer(message("named"), timeout=TIMEOUT_S)
                asking = asyncio.ensure_future(call)
                assert await asyncio.to_thread(core.is_holding.wait, TIMEOUT_S)
                write(tmp_path, named("beta"), "named", version=2)
                shutil.rmtree(tmp_path / "named/1")
                await change(stub)
                core.is_released.set()
                assert "alpha/1" == told(await asking, dict(await call.trailing_metadata())["x-graph-path"])
                shutil.rmtree(tmp_path / "named/2")


async def test_no_request_is_lost_while_files_change_under_a_router_that_polls(target: str, tmp_path: Path) -> None:
    """Also files that are written piece by piece, in place; the path from file to service needs no call."""
    write(tmp_path, named("alpha"), "named")
    path = tmp_path / "named/1/graph.pbtxt"
    with running_router(tmp_path, target, POLL) as router:
        async with clients_of(router) as (stub, clients):
            for model in ("beta", "alpha", "beta"):
                text = named(model)
                for share in (0.3, 0.8):  # the router takes each for a whole file, and keeps what serves
                    path.write_text(text[: int(share * len(text))])
                    await until_index(stub, "1", "READY", "reload failed: ")
                with path.open("w") as file:
                    for start in range(0, len(text), 50):
                        file.write(text[start : start + 50])
                        file.flush()
                await until_index(stub, "1", "READY", "")
                await clients.until_answered_by(f"{model}/1")
            path.write_text(BAD)
            await until_index(stub, "1", "READY", "unknown model 'nobody'")
            await load(stub, rollback=True)
            await clients.until_answered_by("alpha/1")
            write(tmp_path, named("gamma"), "named", version=2)
            await clients.until_answered_by("gamma/2")
            shutil.rmtree(tmp_path / "named/2")
            await until_index(stub, "2", "gone", "")
            await clients.until_answered_by("alpha/1")
    assert [] == [error.details() for error in clients.failures]
    assert {"alpha/1", "beta/1", "gamma/2"} == set(clients.answers)


async def test_a_model_that_changes_while_it_serves_takes_with_it_only_what_does_not_fit(tmp_path: Path) -> None:
    """The index says what does not fit; the version beside it answers, and when the model is as it was both do."""
    core = NamingCore()
    for version, model in enumerate(MODELS[:2], start=1):
        write(tmp_path, named(model), "named", version)
    with naming_service(core) as target, running_router(tmp_path, target) as router:
        async with clients_of(router) as (stub, clients):
            await clients.until_answered_by("beta/2")
            core.dims["beta"] = 7
            await until_index(stub, "2", "UNAVAILABLE", "beta")
            await clients.until_answered_by("alpha/1")
            assert ("READY", "") == (await index_of(stub))["1"]
            core.dims.clear()
            await until_index(stub, "2", "READY", "")
            await clients.until_answered_by("beta/2")
    assert [] == [error.details() for error in clients.failures]


async def _until_config(client: V2Client, is_it: Callable[[ModelConfig, ModelConfig], bool]) -> ModelConfig:
    """The configuration of `outer`, once it is what is wanted; the router asks its models every other second."""
    config = first = await client.config("outer", timeout_s=TIMEOUT_S)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_it(config, first):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
        config = await client.config("outer", timeout_s=TIMEOUT_S)
    return config


async def test_a_job_refuses_a_graph_of_which_a_part_was_replaced_in_place(tmp_path: Path) -> None:
    """Same version and signature, other steps or other weights: no row of the new graph stands beside the old.

    Put back, it goes on, also beside a model that is new and not the graph's.
    """
    core = NamingCore()
    repository, output = tmp_path / "graphs", tmp_path / "output"
    (tmp_path / "in.jsonl").write_text("".join(f'{{"X": "{row}"}}\n' for row in range(4)))
    write(repository, graph("outer", 'sequence { step { graph: "named" } }', tensors="X ANSWER"), "outer")
    write(repository, named("alpha"), "named")
    with naming_service(core) as target, running_router(repository, target, EXPLICIT) as router:
        async with stub_of(router) as stub, V2Client(router.grpc) as client:
            job = BatchOptions("outer", str(tmp_path / "in.jsonl"), output, output_format="jsonl", rows_per_shard=2)
            core.held = "alpha"
            running = asyncio.create_task(run_batch(client, job))
            assert await asyncio.to_thread(core.is_holding.wait, TIMEOUT_S)
            write(repository, named("beta"), "named")
            await load(stub)
            core.is_released.set()
            with pytest.raises(InvalidArgumentError, match="'outer', or a model behind it, has changed while the job"):
                await running
            with pytest.raises(InvalidArgumentError, match="lock was"):
                await run_batch(client, replace(job, resume=True))
            write(repository, named("alpha"), "named")
            await load(stub)
            core.models, core.digests["alpha"] = (*MODELS, "new"), "of other weights"
            config = await _until_config(client, lambda now, was: now != was)
            assert await client.config("new", timeout_s=TIMEOUT_S)
            with pytest.raises(InvalidArgumentError, match="lock was"):
                await run_batch(client, replace(job, resume=True))
            core.digests.clear()
            await _until_config(client, lambda now, _: now != config)
            assert (await run_batch(client, replace(job, resume=True))).num_rows == 4
    answers = "".join(path.read_text() for path in sorted((output / "rows").iterdir()))
    assert "beta" not in answers
    assert 4 == answers.count("alpha,alpha,alpha,alpha")
