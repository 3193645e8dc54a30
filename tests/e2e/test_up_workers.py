"""`weft up` with several workers of the router."""

import os
import signal
from collections.abc import Callable

import pytest
from tests.e2e.test_up_restarts import load
from tests.integration.group import workers_of
from tests.processes import scrape, wait_until

pytestmark = pytest.mark.long

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py


def test_workers_serve_through_deaths_and_restarts(up: Start) -> None:
    """One that hangs is replaced while the router goes on; a rolling restart fails no call; the stop leaves nothing."""
    mesh = up("--router-workers", "2", "--hang-timeout-s", "12")
    address, parent = mesh.endpoints["router"]["grpc"], int(mesh.endpoints["router"]["pid"])
    metrics = mesh.endpoints["router"]["metrics"]
    assert mesh.outcome("chain") == "OK"
    counted = 'chain_batches{model="work"}'  # by the model itself, so that it is no sum over workers
    assert scrape(metrics)[counted] == 1
    hung = workers_of(parent)[2]
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: workers_of(parent).get(2, hung) != hung, "another worker 2")
    wait_until(lambda: scrape(metrics)['weft_worker_up{worker="2"}'] == 1, "an answer of it")
    assert workers_of(parent).keys() == {1, 2}
    assert scrape(metrics)[counted] == 1
    with load(address) as outcomes:
        wait_until(lambda: outcomes["OK"] > 20, "load")
        mesh.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "every service was told to restart" in mesh.log(), mesh.log())
        num_before = outcomes["OK"]
        wait_until(lambda: outcomes["OK"] > num_before + 20, "answers after it")
    assert outcomes.keys() == {"OK"}
    assert "router was replaced" in mesh.log()
    assert mesh.stop() == 0, mesh.log()
    assert mesh.running() == set()
