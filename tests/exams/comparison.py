"""Runs the pipelines of examples/comparison in other systems, and one of them with the faults of docs/comparison.md.

    python -m tests.exams.comparison VENV [--kserve-router FILE]

``VENV``: a virtual environment with ray[serve], bentoml, onnxruntime, pillow, scipy, scikit-learn. ``FILE``: KServe's
cmd/router, built to listen on ROUTER_PORT; its models are those of the examples behind KServe's V1 protocol. The status
is 1 if a pipeline answers other than Weft's does in tests/integration/test_comparison.py.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from tests.exams.comparison_cases import ANSWERS, FAULTS, Edit, pictures
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/comparison"
WAIT_S = 120.0
NUM_REQUESTS = 40
#: Serves a pipeline with Ray until its standard input ends.
RAY = """
import importlib, os, sys
import ray
from ray import serve

name, port = sys.argv[1:]
environment = {"env_vars": {"PYTHONPATH": os.getcwd()}}
ray.init(num_cpus=8, include_dashboard=False, runtime_env=environment)
serve.start(http_options={"port": int(port)})
try:
    serve.run(importlib.import_module(name + ".ray_serve").app, route_prefix="/infer")
    print("ready", flush=True)
    sys.stdin.read()
finally:
    serve.shutdown()
"""


class DeployError(Exception):
    """A pipeline did not come up; the text is the end of what was printed."""


def call(port: int, body: object) -> tuple[int, str]:
    """Status and text of the answer to one request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def process(command: list[str], folder: Path, **variables: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A command in a session of its own, which is ended with the block; and the file of what it prints."""
    log = folder / "log"
    with log.open("wb") as stream:
        started = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=stream, stderr=stream, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(folder), **variables},
        )  # fmt: skip
    try:
        yield started, log
    finally:
        assert started.stdin
        started.stdin.close()  # Ray's driver ends its cluster
        with suppress(subprocess.TimeoutExpired):
            started.wait(20)
        for how in (signal.SIGTERM, signal.SIGKILL):  # BentoML starts a worker that fails again and again, and goes on
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(started.pid, how)
                started.wait(20)


def wait(started: "subprocess.Popen[bytes]", log: Path, is_ready: Callable[[], bool]) -> None:
    """Until a system serves."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_ready():
        if started.poll() is not None or time.monotonic() > deadline_s:
            lines = errors_of(log)
            raise DeployError(lines[-1] if lines else "it did not serve")
        time.sleep(0.3)


def errors_of(log: Path) -> list[str]:
    """Lines that name an error; not those of Ray's end, which this program asks for."""
    return [line for line in log.read_text().splitlines() if "Error" in line and "graceful_shutdown" not in line]


def answers(port: int, path: str) -> bool:
    """Whether a health check is met."""
    with suppress(OSError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).status == 200)
    return False


@contextmanager
def ray_serve(venv: Path, folder: Path, name: str) -> Iterator[int]:
    """A pipeline in Ray Serve; yields its port."""
    port = free_port()
    with process([str(venv / "bin/python"), "-c", RAY, name, str(port)], folder, RAY_USAGE_STATS_ENABLED="0") as (
        p,
        log,
    ):
        wait(p, log, lambda: "ready" in log.read_text().splitlines())
        yield port


@contextmanager
def bentoml_service(venv: Path, folder: Path, name: str) -> Iterator[int]:
    """A pipeline in BentoML; yields its port."""
    port = free_port()
    service = f"{name}.bentoml_service:{''.join(word.title() for word in name.split('_'))}"
    command = [str(venv / "bin/bentoml"), "serve", service, "--port", str(port), "--host", "127.0.0.1"]
    with process(command, folder, BENTOML_DO_NOT_TRACK="True", BENTOML_HOME=str(folder / ".bentoml")) as (p, log):
        wait(p, log, lambda: answers(port, "/readyz"))
        yield port


def v1_models(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """The models of the examples by KServe's names, from instances to predictions."""
    import numpy as np

    code: dict[str, Any] = {"__file__": str(folder / "models/plain.py"), "__name__": "plain"}
    exec(compile((folder / "models/plain.py").read_text(), "plain.py", "exec"), code)

    def digits(name: str) -> Callable[[Any], Any]:
        model = code["Digits"](name)

        def predictions(instances: Any) -> Any:
            found = model(np.array(instances, np.float32))
            rows = zip(found["LABEL"].tolist(), found["PROBS"].tolist(), strict=True)
            return [{"LABEL": label, "PROBS": probs, "CONFIDENCE": max(probs)} for label, probs in rows]

        return predictions

    def vote(answers: Any) -> Any:
        weights = {"cnn": 3, "forest": 2, "tiny": 2}
        rows = {name: answer["predictions"] for name, answer in answers.items() if "predictions" in answer}
        assert len(rows) >= 2, f"{len(rows)} models answered"
        votes = sum(np.eye(10)[[row["LABEL"][0] for row in rows[name]]] * weights[name] for name in rows)
        return [{"LABEL": [label]} for label in votes.argmax(axis=1).tolist()]

    return {
        "decode-digit": lambda images: code["decode"](images).tolist(),
        "decode-page": lambda images: code["decode"](images, 96, 32)[:, 0].tolist(),
        "find-digits": lambda pages: code["find_digits"](np.array(pages[0]))["CROPS"].tolist(),
        "name-digit": lambda rows: [
            {"NAME": name} for name in code["name_digit"](np.array([r["PROBS"] for r in rows]))
        ],
        "vote-digits": vote,
        **{name.replace("_", "-"): digits(name) for name in ("digits_cnn", "digits_forest", "digits_tiny")},
        "digits-committee": digits("digits_committee"),
    }


class V1Handler(BaseHTTPRequestHandler):
    """``POST /v1/models/NAME:predict``, as KServe's servers answer it."""

    models: dict[str, Callable[[Any], Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.rpartition("/")[2].removesuffix(":predict")
        try:
            status, answer = (
                200,
                {"predictions": self.models[name](body if name == "vote-digits" else body["instances"])},
            )
        except Exception as error:
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"[:300]}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def kserve(router: Path, folder: Path, name: str) -> Iterator[int]:
    """A pipeline in KServe's router, as its controller starts it; yields its port."""
    handler = type("Handler", (V1Handler,), {"models": v1_models(folder)})
    server, port = ThreadingHTTPServer(("127.0.0.1", 0), handler), free_port()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = yaml.safe_load((folder / name / "kserve.yaml").read_text())["spec"]
    for step in (step for node in spec["nodes"].values() for step in node["steps"]):
        if service := step.pop("serviceName", ""):
            step["serviceUrl"] = f"http://127.0.0.1:{server.server_port}/v1/models/{service}:predict"
    try:
        with process([str(router), "--graph-json", json.dumps(spec)], folder, ROUTER_PORT=str(port)) as (p, log):
            wait(p, log, lambda: answers(port, "/readyz"))
            yield port
            p.terminate()
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def copied(edits: list[Edit]) -> Iterator[Path]:
    """A copy of the examples with a fault in it."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "examples/comparison"
        shutil.copytree(EXAMPLES, folder)
        (Path(base) / "model_repository").symlink_to(ROOT / "model_repository")
        for file, old, new in edits:
            text = (folder / file).read_text()
            assert old in text, f"{file} has no {old!r}"
            (folder / file).write_text(text.replace(old, new))
        yield folder


def body_of(system: str, name: str) -> object:
    """The request of a pipeline in the form of a system."""
    images = pictures(name)
    if system == "kserve":
        return {"instances": images}
    return {"image": images[0]} if name == "read_page" else {"images": images}


def answer_of(system: str, name: str, text: str) -> object:
    """The tensors of an answer; KServe gives rows, and no boxes."""
    found = json.loads(text)
    if system != "kserve":
        return found
    output = next(iter(ANSWERS[name]))
    key = {"DIGITS": "LABEL"}.get(output, output)
    return {output: [row[key] for row in found["predictions"]]}


def expected(system: str, name: str) -> object:
    """What a system can answer of what Weft answers."""
    return {key: value for key, value in ANSWERS[name].items() if system != "kserve" or key != "BOXES"}


def main() -> int:
    """Run what there is to run; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--kserve-router", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    systems: dict[str, Callable[[Path, str], Any]] = {
        "ray_serve": lambda folder, name: ray_serve(options.venv.absolute(), folder, name),
        "bentoml": lambda folder, name: bentoml_service(options.venv.absolute(), folder, name),
    }
    if options.kserve_router:
        systems["kserve"] = lambda folder, name: kserve(options.kserve_router.absolute(), folder, name)
    num_wrong = 0
    for system, serve in systems.items():
        for name in ANSWERS if options.only in ("", system) else ():
            with copied([]) as folder, serve(folder, name) as port:
                status, text = call(port, body_of(system, name))
                is_right = status == 200 and answer_of(system, name, text) == expected(system, name)
                num_wrong += not is_right
                print(f"{system:10} {name:10} {'as Weft' if is_right else text[:300]}", flush=True)
        for fault, edits in FAULTS.items() if options.only in ("", system) else ():
            print(f"{system:10} {fault:10} {said(system, serve, edits[system])}", flush=True)
    return min(num_wrong, 1)


def said(system: str, serve: Callable[[Path, str], Any], edits: list[Edit]) -> str:
    """When the faulty pipeline is refused, and how."""
    with copied(edits) as folder:
        try:
            with serve(folder, "classify") as port:
                outcomes = [call(port, body_of(system, "classify")) for _ in range(NUM_REQUESTS)]
        except DeployError as error:
            return f"deploy: {error}"
        failed = [(status, text) for status, text in outcomes if status != 200]
        if not failed:
            return f"never: {outcomes[0][1][:200]}"
        log = errors_of(folder / "log")
        return f"request, {len(failed)} of {NUM_REQUESTS}: {failed[0]}; its log: {log[-1][:300] if log else '-'}"


if __name__ == "__main__":
    sys.exit(main())
