"""`weft up --replicas`: several processes of one service behind one target."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import scrape
from tests.wire.floods import flood
from tests.wire.peer import Peer, reset

from weft.base.tensors import decode
from weft.cli.__main__ import main

Start = Callable[..., "Up"]  # noqa: F821  # of conftest.py


def test_calls_are_spread_over_the_replicas_of_a_service(up: Start, repository: Path, tmp_path: Path) -> None:
    """Each has an endpoint and takes any number of cancels; the death of one costs no request that is sent after it.

    With `--model-control-mode poll` a changed model serves soon, but for a service whose own arguments say otherwise.
    """
    changed = shutil.copytree(repository, tmp_path / "repository")
    mesh = up(
        *("--replicas", "model=2", "--model-control-mode", "poll", "--repository-poll-secs", "0.1"),
        *("--service-args", "postprocess=--model-control-mode=none", "--service-args", "postprocess=--log-level debug"),
        repository=changed,
    )
    for service in ("postprocess/finish", "preprocess/prepare"):
        model = changed / service / "1" / "model.py"
        model.write_text(model.read_text().replace("a + 1", "a + 100"))
    end_s = time.monotonic() + 30
    while (answer := decode(mesh.call("chain").outputs["Y"]).tolist()) != [[103.0]]:
        assert time.monotonic() < end_s, answer
    assert {"router", "preprocess", "model", "model-2", "postprocess"} == set(mesh.endpoints)
    for _ in range(20):
        mesh.call("chain")
    samples = scrape(mesh.endpoints["router"]["metrics"])
    for name in ("model", "model-2"):
        endpoint = mesh.endpoints[name]["grpc"]
        (picks,) = [key for key in samples if key.startswith("weft_endpoint_picks_total") and endpoint in key]
        assert samples[picks] >= 4
        assert samples[f'chain_batches{{model="work",service="{name}"}}'] >= 4, "the models' own metrics are apart"
    with Peer.connect(mesh.endpoints["model-2"]["grpc"]) as peer:  # as the router, which passes on its clients' cancels
        peer.handshake()
        path = "/inference.GRPCInferenceService/ServerLive"
        calls = [peer.request(path, b"", stream_id=number) + reset(number) for number in range(1, 24_000, 2)]
        flooded = flood(peer, [b"".join(calls[at : at + 100]) for at in range(0, len(calls), 100)])
        assert flooded.is_open, flooded
    signal.pidfd_send_signal(mesh.pidfds["model-2"], signal.SIGKILL)
    mesh.wait_for_end("model-2")
    assert {"OK"} == {mesh.outcome("chain") for _ in range(10)}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--replicas", "router=2"], "with a NAME of preprocess, model, postprocess"),
        (["--replicas", "model=0"], "a COUNT of 1 to 64"),
        (["--replicas", "model=65"], "a COUNT of 1 to 64"),
        (["--replicas", "model"], "not of the form NAME=COUNT"),
        (["--replicas", "model=2", "--replicas", "model=3"], "each name may be given once"),
        (["--replicas", "model=2", "--in-process", "model"], "replicas are processes"),
        (["--service-args", "nobody=--help"], "a NAME of router, preprocess, model, postprocess, gateway"),
        (["--service-args", "model='--load"], "No closing quotation"),
        (["--in-process", "--router-workers", "2"], "--router-workers 2: --in-process runs models"),
        (["--target-policy", "model=random"], "must be one of least_outstanding"),
    ],
)
def test_wrong_usage_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    """With what is allowed, before anything is started."""
    try:
        status: object = main(["up", "--json", "--repository", str(repository), *arguments])
    except SystemExit as end:
        status = end.code
    output, errors = capsys.readouterr()
    assert (2, "") == (status, output)
    assert fault in errors.replace("\n", " ")
