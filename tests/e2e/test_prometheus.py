"""A real Prometheus scrapes a real `weft up`: every panel shows something, and alerts fire and resolve."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from tests.chain import config_of, write_repository
from tests.e2e.conftest import Up
from tests.integration.group import workers_of
from tests.integration.test_dashboards import DEPLOY, GPU_NAMES, LLM_FILES, expressions
from tests.messages import request_from_call
from tests.ports import free_port
from tests.processes import wait_until
from tests.repositories import write_model

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = [
    pytest.mark.skipif("WEFT_ALERTS" not in os.environ, reason="it takes a minute: make test-alerts"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

#: Stands for `$__rate_interval`; scrapes are a second apart.
WINDOW = "20s"
FLAKY = '''
"""Fails every other time, after 20 ms."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        time.sleep(0.02)
        self.count += 1
        if self.count % 2:
            raise RuntimeError("the other time it works")
        arrays = [pb_utils.get_input_tensor_by_name(request, "A").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("B", array)]) for array in arrays]
'''
RISKY = """
name: "risky" platform: "graph" max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 1 ] } ]
node { name: "root" sequence {
  step { name: "try" model_name: "flaky" fallback { model_name: "work" }
         policy { retry { attempts: 3 on: "INTERNAL" budget_percent: 0.1 } hedge { after_ms: 1 } } } } }
"""


class Prometheus:
    """A running one.

    Args:
        folder: For its files.
        targets: Addresses of metrics by service.
        rules: Text of the alert rules.
    """

    def __init__(self, folder: Path, targets: dict[str, list[str]], rules: str) -> None:
        folder.mkdir()
        (folder / "alerts.yml").write_text(rules)
        jobs = [{"targets": addresses, "labels": {"service": service}} for service, addresses in targets.items()]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "weft", "static_configs": jobs}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}/api/v1"
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        with urllib.request.urlopen(
            f"{self._url}/query?{urllib.parse.urlencode({'query': expression})}", timeout=20
        ) as page:
            answer = json.load(page)
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            self.query("1")
        except OSError:
            return False
        return True

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {sample["metric"]["alertname"] for sample in self.query('ALERTS{alertstate="firing"}')}

    def close(self) -> None:
        """It has ended."""
        self._process.terminate()
        self._process.wait(30)


def impatient(rules: str) -> str:
    """The rules without their pauses, with short windows."""
    return re.sub(r"\[\d+m\]", "[10s]", re.sub(r"for: \d+[ms]\n", "for: 0s\n", rules))


@pytest.fixture
def mesh(tmp_path: Path, up: Callable[..., Up]) -> Up:
    """A mesh with workers, replicas, models on demand, a language model and a graph that needs retries."""
    root = write_repository(tmp_path / "models")
    write_model(root / "model", "flaky", FLAKY, config_of("A", "B"))
    files = {f"model/llm/{name}": text for name, text in LLM_FILES.items()} | {
        "graphs/risky/1/graph.pbtxt": RISKY,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return up(
        "--router-workers=2",
        "--replicas=postprocess=2",
        "--service-args=model=--load-on-demand",
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--adaptive-inflight",
        "--max-inflight-per-client=4",
        repository=root,
    )


@pytest.fixture
def prometheus(tmp_path: Path, mesh: Up) -> Iterator[Prometheus]:
    """Scrapes every process of the mesh; alerts fire at once."""
    targets: dict[str, list[str]] = {}
    for name, endpoint in mesh.endpoints.items():
        targets.setdefault(re.sub(r"[-_]?\d+$", "", name), []).append(endpoint["metrics"])
    rules = impatient((DEPLOY / "kubernetes/components/prometheus/alerts.yml").read_text())
    running = Prometheus(tmp_path / "prometheus", targets, rules)
    try:
        wait_until(running.is_up, "prometheus")
        yield running
    finally:
        running.close()


def burst(mesh: Up) -> None:
    """Requests of every kind, good and bad, eight at once."""

    def infer(model: str) -> None:
        name = {"chain": "X", "llm": "input_ids"}.get(model, "A")
        array = np.zeros(2, np.int32) if model == "llm" else np.zeros((1, 1), np.float32)
        call = InferCall(model, inputs={name: encode(array)})
        with grpc.insecure_channel(mesh.endpoints["router"]["grpc"]) as channel:
            stub = GRPCInferenceServiceStub(channel)
            with contextlib.suppress(grpc.RpcError):
                stub.ModelInfer(request_from_call(call), timeout=20)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(infer, ["chain", "risky", "work", "llm", "risky", "risky", "risky", "risky"] * 4))


def test_every_panel_shows_something_and_alerts_come_and_go(mesh: Up, prometheus: Prometheus) -> None:
    """Those of GPUs apart, which there are none of; every rule can be evaluated."""
    wanted = {
        place: query.replace("$__rate_interval", WINDOW).replace("$model", ".*")
        for place, query in expressions().items()
        if not place.startswith(("alert", "adapter")) and not any(name in query for name in GPU_NAMES)
    }
    empty: set[str] = set(wanted)

    def all_show() -> bool:
        burst(mesh)
        empty.intersection_update(place for place in list(empty) if not prometheus.query(wanted[place]))
        return not empty

    give_up = time.monotonic() + 90
    while not all_show() and time.monotonic() < give_up:
        pass
    assert not empty
    for place, query in expressions().items():
        if place.startswith("alert"):
            prometheus.query(query)  # raises where Prometheus cannot evaluate it

    graph = mesh.repository / "graphs/broken/1/graph.pbtxt"
    graph.parent.mkdir(parents=True)
    graph.write_text(RISKY.replace('"risky"', '"broken"').replace('"flaky"', '"missing"'))
    wait_until(lambda: "WeftGraphDoesNotLoad" in prometheus.firing(), "a graph that never loaded")
    graph.write_text(RISKY.replace('"risky"', '"broken"'))
    wait_until(lambda: "WeftGraphDoesNotLoad" not in prometheus.firing(), "its end")

    def worker_is_down() -> bool:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(workers_of(int(mesh.endpoints["router"]["pid"]))[2], signal.SIGKILL)
        return "WeftWorkerDown" in prometheus.firing()

    wait_until(worker_is_down, "a worker that does not answer")
    wait_until(lambda: "WeftWorkerDown" not in prometheus.firing(), "its return")

    os.kill(int(mesh.endpoints["model"]["pid"]), signal.SIGKILL)
    fired: set[str] = set()

    def page() -> bool:
        mesh.outcome("chain")
        fired.update(prometheus.firing())
        return {"WeftServiceDown", "WeftNoReplica", "WeftErrors"} <= fired

    wait_until(page, "the loss of a service")
    wait_until(lambda: mesh.outcome("chain") == "OK", "its return")
    wait_until(lambda: not {"WeftServiceDown", "WeftNoReplica", "WeftErrors"} & prometheus.firing(), "all well")
