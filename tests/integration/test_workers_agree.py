"""What clients change at one of several workers, and what bandits learn there, holds at all of them."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.group import channel_to, end_worker
from tests.integration.routing import Client, NamingCore, graph, naming_service, running_router, write
from tests.processes import WAIT_S, Running, wait_until

from weft.base.core import IndexEntry
from weft.v2.protocol.recording import read_recording
from weft_protos import graph_service_pb2 as graph_pb

pytestmark = pytest.mark.long

EXPLICIT = ("--model-control-mode", "explicit")


def ranked(algorithm: str, name: str = "ranked") -> str:
    """A bandit over two models."""
    steps = " ".join(f'step {{ name: "{model}" model_name: "{model}" weight: 1 }}' for model in ("alpha", "beta"))
    return graph(name, f"splitter {{ bandit {{ algorithm: {algorithm} epsilon: 0.3 }} {steps} }}")


def known(client: Client, name: str = "ranked") -> dict[str, tuple[int, int, float]]:
    """Pulls, rewards and their sum of each step, as a worker knows them; adds a reward of 0 to both."""
    feedback = [
        graph_pb.GraphFeedbackRequest(graph=name, reward=0.0, path=f"root[{step}]") for step in ("alpha", "beta")
    ]
    return {
        arm.step: (arm.num_pulls, arm.num_rewards, arm.reward_sum)
        for request in feedback
        for arm in client.graphs.GraphFeedback(request, timeout=WAIT_S).arm
    }


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Address of the models."""
    with naming_service() as address:
        yield address


@contextmanager
def both(root: Path, target: str, *arguments: str) -> Iterator[tuple[Running, Client, Client]]:
    """A router of two workers, and a client of each."""
    with running_router(root, target, ["--workers", "2", *arguments]) as router, ExitStack() as stack:
        yield router, *(Client(stack.enter_context(channel_to(router, worker))) for worker in (1, 2))


def test_loads_unloads_and_rollbacks_are_made_by_all(tmp_path: Path, target: str) -> None:
    """Whichever worker is asked, both serve the same afterwards; a file that cannot be loaded changes neither.

    A worker that starts again serves what the other serves, not what the files say by then, and a rollback leads back
    where it would have led, at both.
    """

    def told(*clients: Client) -> set[str]:
        return {client.ask() for client in clients}

    write(tmp_path, graph("named", "alpha"), "named")
    with both(tmp_path, target, *EXPLICIT) as (router, one, two):
        assert {"UNAVAILABLE"} == told(one, two)
        one.load()
        assert {"root.alpha"} == told(one, two)
        write(tmp_path, graph("named", "beta"), "named")
        two.load()
        assert {"root.beta"} == told(one, two)
        write(tmp_path, graph("named", "nobody"), "named")
        with pytest.raises(grpc.RpcError, match="nobody") as caught:
            one.load()
        assert caught.value.code().name == "INVALID_ARGUMENT"
        end_worker(router, 1, signal.SIGKILL)
        with channel_to(router, 1) as channel:
            again = Client(channel)
            assert {"root.beta"} == told(again, two)
            again.load(rollback=True)
            assert {"root.alpha"} == told(again, two)
            two.unload()
            assert {"UNAVAILABLE"} == told(again, two)


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
            asked.unload("alpha")
            assert (one.is_ready("alpha"), two.is_ready("alpha")) == (False, False)
            asked.load("alpha")
            assert (one.is_ready("alpha"), two.is_ready("alpha")) == (True, True)


def test_metrics_keep_a_version_that_was_rolled_back(tmp_path: Path, target: str) -> None:
    """Also what a worker that has ended counted of it; but not its bandits, whose pulls count once until then."""
    write(tmp_path, graph("named", "alpha"), "named")
    answered = 'nv_inference_request_success{model="named",version="%d"}'
    with both(tmp_path, target, *EXPLICIT) as (router, one, two):
        one.load()
        assert one.ask() == "root.alpha"
        write(tmp_path, ranked("EPSILON_GREEDY", "named"), "named", 2)
        one.load()
        step = one.ask().removeprefix("root[").removesuffix("]")
        wait_until(lambda: known(two, "named")[step][0] == 1, "what was learned at both")
        router.scrape()
        end_worker(router, 1, signal.SIGKILL)
        found = router.scrape()
        pulls = sum(value for name, value in found.items() if name.startswith("weft_bandit_pulls_total"))
        assert (found[answered % 1], found[answered % 2], pulls) == (1, 1, 1)
        two.load(rollback=True)
        found = router.scrape()
        assert (found[answered % 1], found[answered % 2]) == (1, 1)
        assert [] == [name for name in found if "bandit" in name]


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
        wait_until(lambda: known(one)["beta"][2] == num_beta, "all rewards")
        wait_until(lambda: known(two)["beta"][2] == num_beta, "all rewards")
        wait_until(lambda: known(one)["alpha"][0] == num_alpha, "all pulls")
        wait_until(lambda: known(two)["alpha"][0] == num_alpha, "all pulls")
        assert {step: (pulls, total) for step, (pulls, _, total) in known(one).items()} == {
            "alpha": (num_alpha, 0.0),
            "beta": (num_beta, num_beta),
        }


def test_what_was_learned_outlives_workers_and_the_group(tmp_path: Path, target: str) -> None:
    """A worker that starts again knows what its sibling knows, nothing twice; with a folder the next group does too."""
    write(tmp_path / "graphs", ranked("EXP3"), "ranked")
    state = ("--state-dir", str(tmp_path / "state"))

    def learned(client: Client) -> tuple[int, float]:
        arms = known(client)
        return arms["alpha"][0] + arms["beta"][0], arms["beta"][2]

    with both(tmp_path / "graphs", target, *state) as (router, one, two):
        for i in range(10):
            assert two.reward(1.0, path=(one if i % 2 else two).ask("ranked").replace("alpha", "beta")) == "OK"
        wait_until(lambda: learned(one) == learned(two) == (10, 10.0), "both know all")
        for worker, other in ((1, two), (2, None)):
            end_worker(router, worker, signal.SIGKILL)
            with channel_to(router, worker) as channel:
                assert learned(Client(channel)) == (10, 10.0)
            if other is not None:
                assert learned(other) == (10, 10.0)
    with both(tmp_path / "graphs", target, *state) as (_, one, two):
        wait_until(lambda: learned(one) == learned(two) == (10, 10.0), "both know all")


def test_all_workers_record(tmp_path: Path, target: str) -> None:
    """One RPC at any of them starts and ends it at both: one file each, sums in one answer, one key of hashes."""

    def record(client: Client, action: str, **more: Any) -> graph_pb.RecordingStatus:
        request = graph_pb.RecordingRequest(action=action, graph="named", **more)  # type: ignore[arg-type]  # its name
        return client.graphs.Recording(request, timeout=WAIT_S).recording[0]

    write(tmp_path / "graphs", graph("named", "alpha"), "named")
    with both(tmp_path / "graphs", target, f"--record-dir={tmp_path / 'kept'}") as (_, one, two):
        started = record(one, "START", percent=100, hash=["X"], max_bytes=1 << 20)
        assert (True, 2) == (started.is_running, len(started.file))
        with pytest.raises(grpc.RpcError, match="recorded already"):
            record(two, "START", percent=100)
        assert ["root.alpha"] * 5 == [client.ask() for client in (one, one, two, two, two)]
        ended = record(two, "STOP")
        assert (False, 5, "stopped") == (ended.is_running, ended.num_requests, ended.end_reason)
        assert sorted(started.file) == sorted(ended.file)
        found = [[one.record.request for one in read_recording(Path(file)) if one.record.path] for file in ended.file]
        assert [2, 3] == sorted(map(len, found))
        assert 1 == len({one.SerializeToString() for requests in found for one in requests})
        assert (5, False) == (record(one, "STATUS").num_requests, record(one, "STATUS").is_running)
