"""What clients change at one of several workers, and what bandits learn there, holds at all of them."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.group import WAIT_S, channel_to, wait_until, workers_of
from tests.integration.routing import NamingCore, Router, message, naming_service, running_router, write

from weft.base.core import IndexEntry
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb
from weft_protos.graph_service_pb2_grpc import GraphServiceStub
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

EXPLICIT = ("--model-control-mode", "explicit")


def graph(model: str) -> str:
    """One step, named after its model."""
    return f"""name: "named" platform: "graph"
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }} ]
node {{ name: "root" sequence {{ step {{ name: "{model}" model_name: "{model}" }} }} }}
"""


def ranked(algorithm: str) -> str:
    """A bandit over two models."""
    return f"""name: "ranked" platform: "graph"
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }} ]
node {{ name: "root" splitter {{ bandit {{ algorithm: {algorithm} epsilon: 0.3 }}
  step {{ name: "alpha" model_name: "alpha" weight: 1 }} step {{ name: "beta" model_name: "beta" weight: 1 }} }} }}
"""


class Client:
    """A client of one worker."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._v2 = GRPCInferenceServiceStub(channel)
        self._graphs = GraphServiceStub(channel)

    def ask(self, name: str = "named", request_id: str = "") -> str:
        """The path of a request, or the status of its failure."""
        try:
            _, call = self._v2.ModelInfer.with_call(message(name, request_id), timeout=WAIT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(dict(call.trailing_metadata())["x-graph-path"])

    def load(self, *, rollback: bool = False) -> None:
        request = pb.RepositoryModelLoadRequest(model_name="named")
        if rollback:
            request.parameters["rollback"].bool_param = True
        self._v2.RepositoryModelLoad(request, timeout=WAIT_S)

    def unload(self) -> None:
        self._v2.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="named"), timeout=WAIT_S)

    def load_model(self, name: str) -> None:
        self._v2.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=WAIT_S)

    def unload_model(self, name: str) -> None:
        self._v2.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=WAIT_S)

    def is_ready(self, name: str) -> bool:
        return bool(self._v2.ModelReady(pb.ModelReadyRequest(name=name), timeout=WAIT_S).ready)

    def reward(self, reward: float, **request: Any) -> str:
        """Status of the feedback."""
        feedback = graph_pb.GraphFeedbackRequest(graph="ranked", reward=reward, **request)
        try:
            self._graphs.GraphFeedback(feedback, timeout=WAIT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def known(self, name: str = "ranked") -> dict[str, tuple[int, int, float]]:
        """Pulls, rewards and their sum of each step, as this worker knows them; adds a reward of 0 to both."""
        return {
            arm.step: (arm.num_pulls, arm.num_rewards, arm.reward_sum)
            for step in ("alpha", "beta")
            for arm in self._graphs.GraphFeedback(
                graph_pb.GraphFeedbackRequest(graph=name, path=f"root[{step}]", reward=0.0), timeout=WAIT_S
            ).arm
        }


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Address of the models."""
    with naming_service() as address:
        yield address


@contextmanager
def both(root: Path, target: str, *arguments: str) -> Iterator[tuple[Router, Client, Client]]:
    """A router of two workers, and a client of each."""
    with running_router(root, target, ["--workers", "2", *arguments]) as router, ExitStack() as stack:
        yield router, *(Client(stack.enter_context(channel_to(router, worker))) for worker in (1, 2))


def test_loads_unloads_and_rollbacks_are_made_by_all(tmp_path: Path, target: str) -> None:
    """Whichever worker is asked, both serve the same afterwards; a file that cannot be loaded changes neither."""
    write(tmp_path, graph("alpha"), "named")
    with both(tmp_path, target, *EXPLICIT) as (_, one, two):
        assert (one.ask(), two.ask()) == ("UNAVAILABLE", "UNAVAILABLE")
        one.load()
        assert (one.ask(), two.ask()) == ("root.alpha", "root.alpha")
        write(tmp_path, graph("beta"), "named")
        two.load()
        assert (one.ask(), two.ask()) == ("root.beta", "root.beta")
        write(tmp_path, graph("nobody"), "named")
        with pytest.raises(grpc.RpcError) as caught:
            one.load()
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert "nobody" in caught.value.details()
        one.load(rollback=True)
        assert (one.ask(), two.ask()) == ("root.alpha", "root.alpha")
        two.unload()
        assert (one.ask(), two.ask()) == ("UNAVAILABLE", "UNAVAILABLE")


class LoadableNames(NamingCore):
    """Loads and unloads its models when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.unloaded: set[str] = set()

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        entries = super().index(ready_only=ready_only)
        return [
            one._replace(state="UNAVAILABLE", reason="unloaded") if one.name in self.unloaded else one
            for one in entries
        ]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.unloaded.discard(name)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.unloaded.add(name)


def test_loads_of_models_are_known_to_all(tmp_path: Path) -> None:
    """When the answer comes, at each worker, whichever was asked: none waits for its next look at the service."""
    with naming_service(LoadableNames()) as target, both(tmp_path, target) as (_, one, two):
        assert (one.is_ready("alpha"), two.is_ready("alpha")) == (True, True)
        for asked in (one, two, one):
            asked.unload_model("alpha")
            assert (one.is_ready("alpha"), two.is_ready("alpha")) == (False, False)
            asked.load_model("alpha")
            assert (one.is_ready("alpha"), two.is_ready("alpha")) == (True, True)


def test_a_worker_that_starts_again_serves_what_the_other_serves(tmp_path: Path, target: str) -> None:
    """Not what the files say by then; a rollback leads back where it would have led, at both."""
    write(tmp_path, graph("alpha"), "named")
    with both(tmp_path, target, *EXPLICIT) as (router, one, two):
        one.load()
        write(tmp_path, graph("beta"), "named")
        one.load()
        write(tmp_path, graph("gamma"), "named")
        killed = workers_of(router.process.pid)[1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: workers_of(router.process.pid).get(1, killed) != killed, "another worker")
        wait_until(lambda: router.scrape()['weft_worker_up{worker="1"}'] == 1, "an answer of it")
        with channel_to(router, 1) as channel:
            again = Client(channel)
            assert (again.ask(), two.ask()) == ("root.beta", "root.beta")
            again.load(rollback=True)
            assert (again.ask(), two.ask()) == ("root.alpha", "root.alpha")
            two.unload()
            assert (again.ask(), two.ask()) == ("UNAVAILABLE", "UNAVAILABLE")


def test_metrics_forget_a_version_that_was_rolled_back(tmp_path: Path, target: str) -> None:
    """Also what a worker that has ended counted of it; what it counted of others stays. Bandits' pulls count once."""
    write(tmp_path, graph("alpha"), "named")
    answered = 'nv_inference_request_success{model="named",version="%d"}'
    with both(tmp_path, target, *EXPLICIT) as (router, one, two):
        one.load()
        assert one.ask() == "root.alpha"
        write(tmp_path, ranked("EPSILON_GREEDY").replace('"ranked"', '"named"'), "named", 2)
        one.load()
        step = one.ask().removeprefix("root[").removesuffix("]")
        wait_until(lambda: two.known("named")[step][0] == 1, "what was learned at both")
        router.scrape()
        killed = workers_of(router.process.pid)[1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: workers_of(router.process.pid).get(1, killed) != killed, "another worker")
        wait_until(lambda: router.scrape()['weft_worker_up{worker="1"}'] == 1, "an answer of it")
        found = router.scrape()
        pulls = sum(value for name, value in found.items() if name.startswith("weft_bandit_pulls_total"))
        assert (found[answered % 1], found[answered % 2], pulls) == (1, 1, 1)
        two.load(rollback=True)
        found = router.scrape()
        assert found[answered % 1] == 1
        assert [] == [name for name in found if 'version="2"' in name or "bandit" in name]


def test_feedback_reaches_the_worker_that_answered(tmp_path: Path, target: str) -> None:
    """Given to the other one it counts once, by id and by path; both come to know the same."""
    write(tmp_path, ranked("EPSILON_GREEDY"), "ranked")
    with both(tmp_path, target) as (_, one, two):
        paths = [client.ask("ranked", f"{name}{i}") for name, client in (("a", one), ("b", two)) for i in range(5)]
        rewards = [float("beta" in path) for path in paths]
        for i in range(5):
            assert two.reward(rewards[i], request_id=f"a{i}") == "OK"
            assert one.reward(rewards[5 + i], request_id=f"b{i}") == "OK"
        assert one.reward(1.0, request_id="a0") == "ALREADY_EXISTS"
        assert two.reward(1.0, request_id="a0") == "ALREADY_EXISTS"
        assert one.reward(1.0, request_id="nobody's") == "NOT_FOUND"
        num_alpha, num_beta = (sum(step in path for path in paths) for step in ("alpha", "beta"))
        # Each look counts a reward of 0 for either step.
        wait_until(lambda: one.known()["beta"][2] == num_beta, "all rewards")
        wait_until(lambda: two.known()["beta"][2] == num_beta, "all rewards")
        wait_until(lambda: one.known()["alpha"][0] == num_alpha, "all pulls")
        wait_until(lambda: two.known()["alpha"][0] == num_alpha, "all pulls")
        assert {step: (pulls, total) for step, (pulls, _, total) in one.known().items()} == {
            "alpha": (num_alpha, 0.0),
            "beta": (num_beta, num_beta),
        }


def test_what_was_learned_outlives_workers_and_the_group(tmp_path: Path, target: str) -> None:
    """A worker that starts again knows what its sibling knows, nothing twice; with a folder the next group does too."""
    write(tmp_path / "graphs", ranked("EXP3"), "ranked")
    state = ("--state-dir", str(tmp_path / "state"))

    def learned(client: Client) -> tuple[int, float]:
        known = client.known()
        return known["alpha"][0] + known["beta"][0], known["beta"][2]

    with both(tmp_path / "graphs", target, *state) as (router, one, two):
        for i in range(10):
            assert two.reward(1.0, path=(one if i % 2 else two).ask("ranked").replace("alpha", "beta")) == "OK"
        wait_until(lambda: learned(one) == learned(two) == (10, 10.0), "both know all")
        for worker, other in ((1, two), (2, None)):
            killed = workers_of(router.process.pid)[worker]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda w=worker, k=killed: workers_of(router.process.pid).get(w, k) != k, "another")
            name = f'weft_worker_up{{worker="{worker}"}}'
            wait_until(lambda name=name: router.scrape()[name] == 1, "an answer of it")
            with channel_to(router, worker) as channel:
                assert learned(Client(channel)) == (10, 10.0)
            if other is not None:
                assert learned(other) == (10, 10.0)
    with both(tmp_path / "graphs", target, *state) as (_, one, two):
        wait_until(lambda: learned(one) == learned(two) == (10, 10.0), "both know all")
