"""The mesh on several hosts, each a network namespace: links are cut, slowed and restored while load runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.chain import write_repository
from tests.faults.hosts import Hosts, why_impossible
from tests.faults.mesh import GRAPH, START_S, RunningLoad, Service
from tests.faults.scenarios import LATE, Outcome, judge

#: Numbers of the hosts; the clients' calls to the second model replica go over a relay, which can slow them.
CLIENT, ROUTER, PREPROCESS, POSTPROCESS, MODEL, MODEL2, RELAY = range(1, 8)
#: How long each fault stays; `make faults` has it longer.
HOLD_S = float(os.environ.get("WEFT_FAULT_S", "1.5"))
_ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.long,  # of links that are cut or slow every run has those of the relay: test_faults.py
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]


class Cluster:
    """Router, preprocess, postprocess and two replicas of model, each on a host of its own."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.hosts = hosts
        repository = write_repository(folder / "repository", GRAPH)

        def service(kind: str, number: int, *arguments: str) -> Service:
            home = repository / ("graphs" if kind == "router" else kind)
            return Service(
                f"weft.services.{kind}",
                ["--repository", str(home), *arguments],
                folder / f"{number}.log",
                hosts.address(number),
                partial(hosts.command, number),
            )

        behind = [service("preprocess", PREPROCESS), service("postprocess", POSTPROCESS)]
        models = [service("model", MODEL), service("model", MODEL2)]
        relay = f"{hosts.address(RELAY)}:{models[1].port}"
        self._relay = subprocess.Popen(
            hosts.command(RELAY, [sys.executable, "-m", "tests.faults.relay", relay, models[1].address]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self._is_done()
        targets = [
            f"--target=preprocess={behind[0].address}",
            f"--target=postprocess={behind[1].address}",
            f"--target=model={models[0].address},{relay}",
        ]
        self.router = service("router", ROUTER, *targets)
        self._services = [*behind, *models, self.router]

    def start(self) -> None:
        """Everything serves."""
        for service in self._services:
            service.start()
        until_s = time.monotonic() + START_S
        for service in self._services:
            check = [sys.executable, "-m", "weft.v2.healthcheck", service.address]
            while subprocess.run(self.hosts.command(CLIENT, check), capture_output=True, check=False).returncode:
                assert time.monotonic() < until_s, service.log.read_text()

    def slow_down(self, delay_s: float) -> None:
        """Every packet between router and second replica takes ``delay_s`` longer."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"pass {delay_s}\n")
        self._relay.stdin.flush()
        self._is_done()

    def play(
        self,
        begin: Callable[[], None],
        end: Callable[[], None],
        *,
        hold_s: float,
        after_s: float,
        deadline_s: float = 4.0,
    ) -> list[Outcome]:
        """What the client on its host saw: with LATE allowed, and with nothing allowed."""
        on_client = partial(self.hosts.command, CLIENT)
        load = RunningLoad(self.router.address, deadline_s=deadline_s, wrap=on_client)
        with contextlib.closing(load):
            time.sleep(1.0)
            begin_s = time.monotonic()
            begin()
            time.sleep(hold_s)
            end_s = time.monotonic()
            end()
            time.sleep(after_s)
            records = load.finish()
        return [judge(records, allowed, begin_s, end_s) for allowed in (LATE, frozenset())]

    def close(self) -> None:
        """Nothing is left."""
        for service in self._services:
            service.end(signal.SIGKILL)
        self._relay.kill()
        self._relay.communicate()

    def _is_done(self) -> None:
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Seven hosts, and the mesh on them."""
    with (
        contextlib.closing(Hosts(*range(1, 8))) as hosts,
        contextlib.closing(Cluster(tmp_path_factory.mktemp("cluster"), hosts)) as made,
    ):
        made.start()
        yield made


def cut_and_restore(cluster: Cluster, *numbers: int) -> Sequence[Callable[[], None]]:
    """What cuts some hosts off, and what brings them back."""
    return (
        lambda: [cluster.hosts.cut(number) for number in numbers] and None,
        lambda: [cluster.hosts.restore(number) for number in numbers] and None,
    )


def test_a_host_that_is_cut_off_costs_nothing(cluster: Cluster, outcomes: dict[str, Outcome]) -> None:
    """One of two model hosts vanishes without a word and comes back: every request is answered right."""
    _, strict = cluster.play(*cut_and_restore(cluster, MODEL2), hold_s=HOLD_S, after_s=1.0)
    outcomes["hosts: one of two model hosts is cut off"] = strict
    assert strict.num_right == strict.num_sent, strict


def test_a_partition_heals(cluster: Cluster, outcomes: dict[str, Outcome]) -> None:
    """With both model hosts cut off, requests fail in time and rightly; soon after the link is back all is right."""
    outcome, _ = cluster.play(*cut_and_restore(cluster, MODEL, MODEL2), hold_s=HOLD_S, after_s=4.0, deadline_s=1.0)
    outcomes["hosts: both model hosts are cut off"] = outcome
    assert (0, 0, 0) == (outcome.num_wrong, outcome.num_lost, outcome.num_twice), outcome
    assert outcome.num_refused > 0
    assert outcome.recover_s < 3.5, outcome


def test_a_slow_link_is_avoided(cluster: Cluster, outcomes: dict[str, Outcome]) -> None:
    """With 0.4 s on the way to one replica every request is answered right, and within the other's time."""
    slow, quick = partial(cluster.slow_down, 0.4), partial(cluster.slow_down, 0.0)
    _, strict = cluster.play(slow, quick, hold_s=HOLD_S, after_s=1.0)
    outcomes["hosts: 0.4 s on the link to one of two"] = strict
    assert strict.num_right == strict.num_sent, strict
