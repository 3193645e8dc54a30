"""`weft top` over real metrics pages."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.base.errors import InternalError
from weft.base.statistics import LatencyHistogram, ModelStatistics
from weft.cli.__main__ import main
from weft.tools.top import frame_text
from weft.v2.client.frames import ModelRow, Page, frame_of, quantiles_ms, scrape
from weft.v2.server.metrics import make_registry, serve_metrics

INFINITE = float("inf")


class Service:
    """A metrics page whose counters a test moves."""

    def __init__(self) -> None:
        self.counters = ModelStatistics("digits", "1")
        self.counters.request_latency = {1: LatencyHistogram(), 2: LatencyHistogram()}
        self.counters.queue_latency = {1: LatencyHistogram()}
        self.counters.count_pending_by_level = lambda: {1: 4, 2: 3}
        self.address = f"127.0.0.1:{serve_metrics(make_registry(lambda: [self.counters]), '127.0.0.1', 0)}"

    def answer(self, num: int, seconds: float, level: int = 1) -> None:
        for _ in range(num):
            self.counters.request_latency[level].observe(seconds)


@pytest.fixture(scope="module")
def service() -> Service:
    return Service()


@pytest.fixture
def closed_address() -> Iterator[str]:
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_rates_and_latencies_are_those_of_the_interval(service: Service, closed_address: str) -> None:
    """By priority, busiest first; what happened before does not count; a service that is down is named with why."""
    addresses = {"model": service.address, "router": closed_address}
    service.answer(1000, 9.0)
    before = scrape(addresses)
    service.answer(90, 0.004)
    service.answer(10, 0.2)
    service.answer(7, 0.0001, level=2)
    service.counters.record_failure(InternalError("it failed"), 5)
    now = scrape(addresses)
    frame = frame_of(addresses, before, now)
    assert [("model", True), ("router", False)] == [(row.name, row.is_up) for row in frame.services]
    assert "refused" in frame.services[1].error
    seconds = now["model"].at_s - before["model"].at_s
    busy, idle = frame.models
    assert ("digits", "1", "model", 4) == (busy.model, busy.priority, busy.kind, busy.queue_size)
    assert busy.requests_per_s == pytest.approx(100 / seconds)
    assert busy.failures_per_s == pytest.approx(1 / seconds)
    assert busy.p50_ms is not None
    assert busy.p99_ms is not None
    assert 2.5 < busy.p50_ms < 5
    assert 100 < busy.p99_ms < 250
    assert ("2", 3, None) == (idle.priority, idle.queue_size, idle.queue_p99_ms)
    text = frame_text(frame)
    assert f"{closed_address}  DOWN: " in text
    assert any(line.split()[:5] == ["model", "model", "digits", "1", "1"] for line in text.splitlines())


def test_a_service_that_was_started_anew_counts_from_its_start() -> None:
    """Counters that fell give no negative rates."""

    def page(at_s: float, count: float) -> Page:
        labels = {"model": "m", "version": "1", "priority": "1"}
        buckets = [({**labels, "le": le}, count) for le in ("0.001", "+Inf")]
        return Page(at_s, {"weft_request_latency_seconds_bucket": buckets})

    frame = frame_of({"model": "a:1"}, {"model": page(10.0, 500)}, {"model": page(12.0, 8)})
    assert [4.0] == [row.requests_per_s for row in frame.models]


def test_a_service_that_did_not_answer_once_has_no_rates_made_up(service: Service, closed_address: str) -> None:
    """What it counted since its start is not taken for what happened in the interval."""
    service.answer(1000, 9.0)
    frame = frame_of({"m": "a:1"}, scrape({"m": closed_address}), scrape({"m": service.address}))
    assert [True] == [row.is_up for row in frame.services]
    assert {0.0} == {row.requests_per_s for row in frame.models}


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ({}, [None, None]),
        ({0.1: 0.0, INFINITE: 0.0}, [None, None]),
        ({0.1: 100.0, INFINITE: 100.0}, [50.0, 99.0]),
        ({0.1: 50.0, 0.2: 100.0, INFINITE: 100.0}, [100.0, 198.0]),
        ({0.1: 0.0, INFINITE: 5.0}, [100.0, 100.0]),
    ],
)
def test_quantiles_lie_within_their_bucket(buckets: dict[float, float], expected: list[float | None]) -> None:
    """By linear interpolation; beyond the last bound it is that bound; nothing observed is nothing."""
    got = quantiles_ms(buckets, (0.5, 0.99))
    assert expected == [None if value is None else pytest.approx(value) for value in got]


def test_a_frame_fits_the_terminal() -> None:
    """Lines are cut to its width, rows that do not fit are counted, and a name cannot move the cursor."""
    rows = [ModelRow("s", "model", f"m{n}\x1b[2J", "1", "1", 1.0, 0.0, 0, None, 1.0, 2.0, 3.0) for n in range(40)]
    frame = frame_of({}, {}, {})
    text = frame_text(type(frame)(1.0, [], rows), width=50, height=12)
    assert 12 == len(text.splitlines())
    assert all(len(line) <= 50 for line in text.splitlines())
    assert "... 33 more" in text
    assert "\x1b" not in text


def test_one_frame_for_scripts(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one object from the endpoints of `weft up --json`; without a terminal it is text."""
    endpoints = tmp_path / "endpoints.json"
    both = {name: {"grpc": "a:1", "metrics": service.address, "pid": 1} for name in ("router", "model")}
    endpoints.write_text(json.dumps(both) + "\n")
    assert 0 == main(["top", "--endpoints", str(endpoints), "--json", "--interval-s", "0.01"])
    frame = json.loads(capsys.readouterr().out)
    assert ["router"] == [row["name"] for row in frame["services"]]  # the other one is in the same process
    assert "digits" in {row["model"] for row in frame["models"]}
    assert 0 == main(["top", "--service", f"model={service.address}", "--interval-s", "0.01"])
    assert "digits" in capsys.readouterr().out


def test_what_cannot_be_read_is_told(tmp_path: Path, closed_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none is wrong usage; when no service answers the status is 1."""
    bad = tmp_path / "endpoints.json"
    for text in ("", "[]", "{", '{"router": 5}'):
        bad.write_text(text)
        assert 2 == main(["top", "--endpoints", str(bad), "--once"])
        assert "weft up --json" in capsys.readouterr().err
    assert 1 == main(["top", "--url", closed_address, "--once", "--interval-s", "0.01"])
    assert "DOWN" in capsys.readouterr().out


def test_a_terminal_gets_frame_after_frame(service: Service) -> None:
    """On the alternate screen, until Ctrl-C, which gives the terminal back as it was."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "weft.cli", "top", "--service", f"model={service.address}", "--interval-s", "0.05"]
    seen = b""
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        try:
            end_s = time.monotonic() + 30
            while seen.count(b"\x1b[H") < 3:
                assert select.select([leader], [], [], end_s - time.monotonic())[0], seen
                seen += os.read(leader, 65536)
            process.send_signal(signal.SIGINT)
            while select.select([leader], [], [], 30)[0]:
                try:
                    seen += os.read(leader, 65536)
                except OSError:  # Linux says so at the end
                    break
            assert 0 == process.wait(30)
        finally:
            process.kill()
    os.close(leader)
    assert seen.startswith(b"\x1b[?1049h")
    assert seen.endswith(b"\x1b[?1049l")
    assert b"digits" in seen


def test_ranks_are_a_table_of_their_own() -> None:
    """Steps of the interval, their mean time, memory and restarts; without ranks there is no such table."""
    labels = {"model": "chat", "version": "1", "instance": "chat_0_0"}

    def page(at_s: float, num_steps: int, steps_s: float) -> Page:
        rank = labels | {"rank": "1"}
        figures = {"steps_total": num_steps, "step_seconds_total": steps_s, "resident_memory_bytes": 3 << 20}
        samples = {f"weft_llm_rank_{name}": [(rank, float(value))] for name, value in figures.items()}
        return Page(at_s, samples | {"weft_llm_rank_restarts_total": [(labels, 2.0)]})

    addresses = {"model": "localhost:1"}
    frame = frame_of(addresses, {"model": page(1.0, 100, 1.0)}, {"model": page(3.0, 140, 1.2)})
    (row,) = frame.ranks
    assert ("chat", "1", 20.0, 3.0, 2) == (row.model, row.rank, row.steps_per_s, row.rss_mib, row.num_restarts)
    assert row.step_ms == pytest.approx(5.0)
    assert " ".join(frame_text(frame).splitlines()[-1].split()) == "model chat chat_0_0 1 20.0 5.00 3 0 2"
    assert "RANK" not in frame_text(frame_of({}, {}, {}))


def test_roles_are_a_table_of_their_own() -> None:
    """Transfers of blocks in the interval, and open leases; replicas for whole requests are not in it."""
    labels = {"model": "chat", "version": "1", "instance": "chat_0_0"}

    def page(at_s: float, num: int, role: str) -> Page:
        samples = {
            "weft_llm_role": [(labels | {"role": role}, 1.0)],
            "weft_llm_kv_transfers_total": [
                (labels | {"outcome": outcome}, float(num * factor))
                for outcome, factor in (("complete", 2), ("late", 1))
            ],
            "weft_llm_kv_transfer_bytes_total": [(labels, float(num << 20))],
            "weft_llm_kv_leases": [(labels, 3.0)],
        }
        return Page(at_s, samples)

    frame = frame_of({"model": "localhost:1"}, {"model": page(1.0, 0, "decode")}, {"model": page(3.0, 10, "decode")})
    assert [("model", "chat", "chat_0_0", "decode", 10.0, 5.0, 5.0, 3)] == list(frame.roles)
    assert "model chat chat_0_0 decode 10.0 5.0 5.0 3" == " ".join(frame_text(frame).splitlines()[-1].split())
    assert not frame_of({"model": ""}, {"model": page(1.0, 0, "both")}, {"model": page(3.0, 10, "both")}).roles


def test_rollouts_are_a_table_of_their_own() -> None:
    """With the phase that each is in, its share, and the rates of its candidate."""

    def page(at_s: float, num: float) -> Page:
        key = {"graph": "triage", "node": "root", "candidate": "new"}
        arms = [({**key, "arm": arm}, num * times) for arm, times in (("candidate", 1), ("baseline", 9))]
        phases = [({**key, "phase": name}, float(name == "RUNNING")) for name in ("RUNNING", "PAUSED")]
        samples = {"weft_rollout_requests_total": arms, "weft_rollout_phase": phases}
        samples["weft_rollout_percent"] = [(key, 5.0)]
        return Page(at_s, samples)

    frame = frame_of({"router": ""}, {"router": page(1.0, 10)}, {"router": page(3.0, 30)})
    assert [("router", "triage", "root", "new", "RUNNING", 5.0, 10.0, 0.0)] == list(frame.rollouts)
    assert "router   triage  root  new        RUNNING      5.0   10.0     0.0" == frame_text(frame).splitlines()[-1]
