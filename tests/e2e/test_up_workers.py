"""`weft up` with several workers of the router."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.e2e.test_up_restarts import load, wait_until
from tests.integration.group import workers_of

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py


def test_workers_serve_through_deaths_and_restarts(up: Start) -> None:
    """One that hangs is replaced while the router goes on; a rolling restart fails no call; the stop leaves nothing."""
    mesh = up("--router-workers", "2", "--hang-timeout-s", "12")
    address, parent = mesh.endpoints["router"]["grpc"], int(mesh.endpoints["router"]["pid"])
    metrics = f"http://{mesh.endpoints['router']['metrics']}/metrics"

    def scrape() -> str:
        with urllib.request.urlopen(metrics, timeout=10) as page:
            return str(page.read().decode())

    assert mesh.outcome("chain") == "OK"
    counted = 'chain_batches{model="work"} 1.0'  # by the model itself, so that it is no sum over workers
    assert counted in scrape()
    hung = workers_of(parent)[2]
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: workers_of(parent).get(2, hung) != hung, "another worker 2")
    wait_until(lambda: 'weft_worker_up{worker="2"} 1.0' in scrape(), "an answer of it")
    assert workers_of(parent).keys() == {1, 2}
    assert counted in scrape()
    with load(address) as outcomes:
        wait_until(lambda: outcomes["OK"] > 20, "load")
        mesh.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "weft: every service was told to restart" in mesh.log(), mesh.log())
        num_before = outcomes["OK"]
        wait_until(lambda: outcomes["OK"] > num_before + 20, "answers after it")
    assert outcomes.keys() == {"OK"}
    assert "weft: router was replaced" in mesh.log()
    assert mesh.stop() == 0, mesh.log()
    assert mesh.running() == set()


def test_models_in_the_router_have_one_process(repository: Path) -> None:
    """Several workers would be several copies of each model, so that is wrong usage."""
    command = [sys.executable, "-m", "weft.cli", "up", "--repository", str(repository), "--in-process"]
    ended = subprocess.run([*command, "--router-workers", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--router-workers 2: --in-process runs models" in ended.stderr


def test_one_worker_is_one_process(up: Start) -> None:
    """Without the option the router has no child, and no figures of workers."""
    mesh = up("--router-workers", "1")
    parent = int(mesh.endpoints["router"]["pid"])
    assert Path(f"/proc/{parent}/task/{parent}/children").read_text() == ""
    with urllib.request.urlopen(f"http://{mesh.endpoints['router']['metrics']}/metrics", timeout=10) as page:
        assert b"worker" not in page.read()
