"""What bandits have learned, across the end of a real router and back: a stop, a crash, another graph."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.routing import Router, command_of, message, naming_service, running_router, write

from weft_protos import graph_service_pb2 as pb
from weft_protos.graph_service_pb2_grpc import GraphServiceStub
from weft_protos.grpc_service_pb2 import RepositoryModelLoadRequest
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

TIMEOUT_S = 30.0
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
Figures = dict[str, tuple[float, float, float]]


def graph(*models: str) -> str:
    """A bandit over models of these names."""
    steps = " ".join(f'step {{ name: "{model}" model_name: "{model}" weight: 1 }}' for model in models)
    return f"""name: "ranked" platform: "graph"
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }} ]
node {{ name: "root" splitter {{ bandit {{ algorithm: EPSILON_GREEDY epsilon: 0.3 }} {steps} }} }}
"""


class Client:
    """A client that rewards model ``beta`` and no other."""

    def __init__(self, router: Router, channel: grpc.Channel) -> None:
        self.v2 = GRPCInferenceServiceStub(channel)
        self._service = GraphServiceStub(channel)
        self._router = router

    def ask(self, request_id: str = "") -> str:
        """The path that a request takes."""
        _, call = self.v2.ModelInfer.with_call(message("ranked", request_id), timeout=TIMEOUT_S)
        return dict(call.trailing_metadata())["x-graph-path"]

    def reward(self, reward: float, **request: Any) -> str:
        """Status of the feedback."""
        feedback = pb.GraphFeedbackRequest(graph="ranked", reward=reward, **request)
        try:
            self._service.GraphFeedback(feedback, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def learn(self, num_requests: int, prefix: str) -> None:
        """Ask, and reward half of the answers by id and half by path."""
        for i in range(num_requests):
            path = self.ask(f"{prefix}{i}")
            named = {"request_id": f"{prefix}{i}"} if i % 2 else {"path": path}
            assert "OK" == self.reward(float("beta" in path), **named)

    def figures(self) -> Figures:
        """Pulls, rewards and their sum of each step, as Prometheus sees them."""
        samples = self._router.scrape()
        return {
            step: tuple(
                samples.get(f'weft_bandit_{name}_total{{graph="ranked",node="root",step="{step}"}}', -1.0)
                for name in ("pulls", "rewards", "reward_sum")
            )
            for step in ("alpha", "beta", "gamma")
        }


@contextmanager
def connected(repository: Path, target: str, *arguments: str) -> Iterator[tuple[Router, Client]]:
    with running_router(repository, target, arguments) as router, grpc.insecure_channel(router.grpc) as channel:
        yield router, Client(router, channel)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Address of the models."""
    with naming_service() as address:
        yield address


def saved(folder: Path) -> int:
    """Number of pulls and rewards on disk."""
    path = folder / "bandits.json"
    arms = json.loads(path.read_text())["arms"] if path.exists() else []
    return sum(arm["pulls"] + arm["rewards"] for arm in arms)


def test_a_router_goes_on_where_the_one_before_it_stopped(target: str, tmp_path: Path) -> None:
    """Every count is there; requests of the old one are known by their path, and not by their id."""
    repository, state = tmp_path / "graphs", ("--state-dir", str(tmp_path / "state"))
    write(repository, graph("alpha", "beta"), "ranked")
    with connected(repository, target, *state) as (_, client):
        client.learn(60, "first")
        path = client.ask("asked")
        before = client.figures()
    assert before["gamma"] == (-1.0, -1.0, -1.0)
    assert (61.0, 60.0) == tuple(before["alpha"][i] + before["beta"][i] for i in (0, 1))
    assert before["beta"][0] > before["alpha"][0]
    with connected(repository, target, *state) as (_, client):
        assert before == client.figures()
        assert "NOT_FOUND" == client.reward(1.0, request_id="asked")
        assert "OK" == client.reward(0.0, path=path)
        busy = subprocess.run(
            [*command_of(repository, target), *state],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert 1 == busy.returncode
        assert b"another router uses --state-dir" in busy.stderr
        client.learn(20, "second")
        assert 82.0 == 1 + sum(client.figures()[step][0] for step in ("alpha", "beta"))
    with connected(repository, target) as (_, client):
        assert {"alpha": (0.0, 0.0, 0.0), "beta": (0.0, 0.0, 0.0), "gamma": (-1.0, -1.0, -1.0)} == client.figures()


def test_a_crash_loses_no_more_than_was_not_written_yet(target: str, tmp_path: Path) -> None:
    """What the file has is there again, and it is never torn: killed at several moments, while it is written."""
    repository, folder = tmp_path / "graphs", tmp_path / "state"
    write(repository, graph("alpha", "beta"), "ranked")
    known = 0
    for crash in range(3):
        with connected(repository, target, "--state-dir", str(folder)) as (router, client):
            figures = client.figures()
            restored = int(sum(figures[step][0] + figures[step][1] for step in ("alpha", "beta")))
            assert known <= restored <= known + 20
            client.learn(20, f"r{crash}-")
            deadline_s = time.monotonic() + TIMEOUT_S
            while saved(folder) < restored + 40:
                assert time.monotonic() < deadline_s, "the file was not written"
                time.sleep(0.01)
            client.learn(5, f"late{crash}-")
            router.kill()
        known = restored + 40
        assert known <= saved(folder) <= known + 10


def test_the_steps_of_a_new_graph_go_on_from_what_is_known(target: str, tmp_path: Path) -> None:
    """Of those that it keeps; feedback for a step that it has dropped still counts, and the step may come back."""
    write(tmp_path, graph("alpha", "beta"), "ranked")
    with connected(tmp_path, target, *EXPLICIT) as (_, client):
        client.learn(40, "old")
        late = client.ask("late")
        before = client.figures()
        dropped = "alpha" if "alpha" in late else "beta"
        kept = "beta" if dropped == "alpha" else "alpha"
        write(tmp_path, graph(kept, "gamma"), "ranked")
        client.v2.RepositoryModelLoad(RepositoryModelLoadRequest(model_name="ranked"), timeout=TIMEOUT_S)
        now = client.figures()
        assert (before[kept], (-1.0, -1.0, -1.0), (0.0, 0.0, 0.0)) == (now[kept], now[dropped], now["gamma"])
        assert {"gamma", kept} >= {client.ask().removeprefix("root[").removesuffix("]") for _ in range(20)}
        assert "INVALID_ARGUMENT" == client.reward(1.0, path=late)
        assert "OK" == client.reward(1.0, request_id="late")
        assert "ALREADY_EXISTS" == client.reward(1.0, request_id="late")
        rollback = RepositoryModelLoadRequest(model_name="ranked")
        rollback.parameters["rollback"].bool_param = True
        client.v2.RepositoryModelLoad(rollback, timeout=TIMEOUT_S)
        pulls, rewards, reward_sum = before[dropped]
        assert (pulls, rewards + 1, reward_sum + 1) == client.figures()[dropped]
