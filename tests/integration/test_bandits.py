"""What bandits have learned, across the end of a real router and back: a stop, a crash, another graph."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from tests.integration.routing import Client, command_of, graph, naming_service, running_router, write
from tests.processes import WAIT_S, Running, wait_until

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
Figures = dict[str, tuple[float, float, float]]


def ranked(*models: str) -> str:
    """A bandit over models of these names."""
    steps = " ".join(f'step {{ name: "{model}" model_name: "{model}" weight: 1 }}' for model in models)
    return graph("ranked", f"splitter {{ bandit {{ algorithm: EPSILON_GREEDY epsilon: 0.3 }} {steps} }}")


def learn(client: Client, num_requests: int, prefix: str) -> None:
    """Ask, reward model ``beta`` and no other: half of the answers by id and half by path."""
    for i in range(num_requests):
        path = client.ask("ranked", f"{prefix}{i}")
        named = {"request_id": f"{prefix}{i}"} if i % 2 else {"path": path}
        assert "OK" == client.reward(float("beta" in path), **named)


def figures(router: Running) -> Figures:
    """Pulls, rewards and their sum of each step, as Prometheus sees them."""
    samples = router.scrape()
    return {
        step: tuple(
            samples.get(f'weft_bandit_{name}_total{{graph="ranked",node="root",step="{step}"}}', -1.0)
            for name in ("pulls", "rewards", "reward_sum")
        )
        for step in ("alpha", "beta", "gamma")
    }


@contextmanager
def connected(repository: Path, target: str, *arguments: str) -> Iterator[tuple[Running, Client]]:
    with running_router(repository, target, arguments) as router, grpc.insecure_channel(router.grpc) as channel:
        yield router, Client(channel)


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
    write(repository, ranked("alpha", "beta"), "ranked")
    with connected(repository, target, *state) as (router, client):
        learn(client, 60, "first")
        path = client.ask("ranked", "asked")
        before = figures(router)
    assert before["gamma"] == (-1.0, -1.0, -1.0)
    assert (61.0, 60.0) == tuple(before["alpha"][i] + before["beta"][i] for i in (0, 1))
    assert before["beta"][0] > before["alpha"][0]
    with connected(repository, target, *state) as (router, client):
        assert before == figures(router)
        assert "NOT_FOUND" == client.reward(1.0, request_id="asked")
        assert "OK" == client.reward(0.0, path=path)
        module, *arguments = command_of(repository, target)
        command = [sys.executable, "-m", module, *arguments, "--metrics-port", "0", *state]
        busy = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
        assert 1 == busy.returncode
        assert b"another router uses --state-dir" in busy.stderr
        learn(client, 20, "second")
        assert 82.0 == 1 + sum(figures(router)[step][0] for step in ("alpha", "beta"))
    with connected(repository, target) as (router, client):
        assert {"alpha": (0.0, 0.0, 0.0), "beta": (0.0, 0.0, 0.0), "gamma": (-1.0, -1.0, -1.0)} == figures(router)


def test_a_crash_loses_no_more_than_was_not_written_yet(target: str, tmp_path: Path) -> None:
    """What the file has is there again, and it is never torn: killed at several moments, while it is written."""
    repository, folder = tmp_path / "graphs", tmp_path / "state"
    write(repository, ranked("alpha", "beta"), "ranked")
    known = 0
    for crash in range(3):
        with connected(repository, target, "--state-dir", str(folder)) as (router, client):
            found = figures(router)
            restored = int(sum(found[step][0] + found[step][1] for step in ("alpha", "beta")))
            assert known <= restored <= known + 20
            learn(client, 20, f"r{crash}-")
            wait_until(lambda expected=restored + 40: saved(folder) >= expected, "the file")
            learn(client, 5, f"late{crash}-")
            router.kill()
        known = restored + 40
        assert known <= saved(folder) <= known + 10


def test_the_steps_of_a_new_graph_go_on_from_what_is_known(target: str, tmp_path: Path) -> None:
    """Of those that it keeps; feedback for a step that it has dropped still counts, and the step may come back."""
    write(tmp_path, ranked("alpha", "beta"), "ranked")
    with connected(tmp_path, target, *EXPLICIT) as (router, client):
        learn(client, 40, "old")
        late = client.ask("ranked", "late")
        before = figures(router)
        dropped = "alpha" if "alpha" in late else "beta"
        kept = "beta" if dropped == "alpha" else "alpha"
        write(tmp_path, ranked(kept, "gamma"), "ranked")
        client.load("ranked")
        now = figures(router)
        assert (before[kept], (-1.0, -1.0, -1.0), (0.0, 0.0, 0.0)) == (now[kept], now[dropped], now["gamma"])
        assert {"gamma", kept} >= {client.ask("ranked").removeprefix("root[").removesuffix("]") for _ in range(20)}
        assert "INVALID_ARGUMENT" == client.reward(1.0, path=late)
        assert "OK" == client.reward(1.0, request_id="late")
        assert "ALREADY_EXISTS" == client.reward(1.0, request_id="late")
        client.load("ranked", rollback=True)
        pulls, rewards, reward_sum = before[dropped]
        assert (pulls, rewards + 1, reward_sum + 1) == figures(router)[dropped]
