"""The benchmark of the wire: checks, tables, and each sender against a bare server for real."""

import shutil
from pathlib import Path

import grpc
import pytest
from benchmarks.floor import running_floor
from benchmarks.servers import Server
from benchmarks.tis import NAME as TIS
from benchmarks.wire.burst import Burst, BurstRow, burst_table, run_burst
from benchmarks.wire.candidates import BARE, ONE_PROCESS, Candidate
from benchmarks.wire.figures import full_table, goal_table, ratio
from benchmarks.wire.rounds import Cell, Measured, Plan, Row, cells, faults, measure
from benchmarks.wire.senders import GrpcAio, H2Load, Sender, Sent, TritonClient, available_senders, read_h2load
from benchmarks.wire.workloads import IDENTITY, REPOSITORIES, TEXTS, WORKLOADS, Payload, Shape, chosen
from google.protobuf import text_format

from weft.capacity.tuning.load import Load
from weft.v2.client.wires import WireName
from weft_protos.model_config_pb2 import ModelConfig

REPORT = """
finished in 250.00ms, 40.00 req/s, 1.00KB/s
requests: 10 total, 10 started, 10 done, 9 succeeded, 1 failed, 1 errored, 0 timeout
status codes: 9 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.50KB (1536) total, 512B (512) headers (space savings 50.00%), 1.00KB (1017) data
"""
LOG = "\n".join([*(f"1700000000000000\t200\t{number * 1000}" for number in range(1, 10)), "1700000000000000\t-1\t5"])


def _candidate(endpoint) -> Candidate:
    return Candidate(Server("bare echo, grpcio", endpoint.grpc, lambda: [endpoint.pid]), BARE, WireName.GRPCIO)


def _measured(cpu_s: float, mean_ms: float = 1.0, problems: tuple[str, ...] = ()) -> Measured:
    return Measured(100, len(problems), 1000.0, mean_ms, 1.0, 2.0, cpu_s, problems)


def _row(server: str, arrangement: str, *rounds: Measured) -> Row:
    candidate = Candidate(Server(server, "", list), arrangement, "" if server == TIS else WireName.GRPCIO)
    return Cell(IDENTITY, Shape(4, 8), H2Load(), candidate).summary(list(rounds))


def test_what_h2load_reports_is_read() -> None:
    """Latencies come from its log, requests without an answer are errors, bodies are counted in bytes."""
    load, num_body_bytes = read_h2load(REPORT, LOG)
    assert 0.25 == load.duration_s
    assert 5.0 == load.percentile_ms(50)
    assert {"NO_ANSWER": 1} == load.errors
    assert 1017 == num_body_bytes


def test_h2load_without_a_report_is_an_error() -> None:
    """What it printed instead is in the message."""
    with pytest.raises(RuntimeError, match="no such option"):
        read_h2load("h2load: no such option", "")


@pytest.mark.parametrize(
    ("sent", "num_succeeded", "expected"),
    [
        (Sent(Load(), 10 * 105), 10, ""),
        (Sent(Load()), 10, ""),
        (Sent(Load(), 9 * 105), 10, "945 bytes of answers, not 1050"),
        (Sent(Load(), 10 * 105), 9, "counts 9 successes for 10 requests"),
    ],
)
def test_a_call_that_h2load_takes_for_answered_must_be_so(sent: Sent, num_succeeded: int, expected: str) -> None:
    """Refused calls have no body, and the server does not count them as successes: either shows."""
    assert expected in "; ".join(faults(sent, 10, 100, num_succeeded))
    assert bool(expected) == bool(faults(sent, 10, 100, num_succeeded))


def test_failed_calls_are_faults_by_status() -> None:
    """What a client saw is said as it saw it."""
    load = Load()
    load.errors["UNAVAILABLE"] = 3
    assert ["3 UNAVAILABLE"] == faults(Sent(load), 10, 100, 10)


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that is twice as slow in one round moves neither the ratio nor the verdict."""
    theirs = _row(TIS, TIS, _measured(0.1), _measured(0.2), _measured(0.1))
    mine = _row("Weft, one process, grpcio", ONE_PROCESS, _measured(0.08), _measured(0.16), _measured(0.05))
    assert 0.8 == pytest.approx(ratio(mine, theirs))
    header, line = goal_table([theirs, mine]).splitlines()[-2:]
    assert ["over", "grpcio"] == header.split()[-2:]
    assert ["0.9", "0.80*"] == line.split()[-2:]
    assert "" == goal_table([mine])


def test_a_run_with_a_problem_is_marked() -> None:
    """Its row says what was wrong, once however many rounds had it, and counts the errors of all rounds."""
    wrong = _measured(0.1, problems=("wrong",))
    row = _row(TIS, TIS, _measured(0.1), wrong, wrong)
    assert (("wrong",), 2) == (row.problems, row.num_errors)
    assert "2  wrong" in full_table([row])


def test_bare_servers_and_mixed_requests_have_the_senders_that_suit_them() -> None:
    """A client that reads answers is no use to a server that gives back requests; h2load sends one request alone."""
    bare, tis = (Candidate(Server("s", "", list), arrangement) for arrangement in (BARE, TIS))
    senders: list[Sender] = [H2Load(), TritonClient()]
    assert {("h2load", BARE), ("h2load", TIS), ("tritonclient", TIS)} == {
        (cell.sender.name, cell.candidate.arrangement) for cell in cells([IDENTITY], [bare, tis], senders)
    }
    assert {("tritonclient", TIS)} == {
        (cell.sender.name, cell.candidate.arrangement) for cell in cells([TEXTS], [bare, tis], senders)
    }


def test_workloads_are_chosen_by_name() -> None:
    """Every name that has one of the texts."""
    assert list(WORKLOADS) == chosen([])
    assert ["identity", "identity3"] == [workload.name for workload in chosen(["identity"])]


def test_both_servers_get_a_model_for_rows_of_any_length(tmp_path: Path) -> None:
    """The repository of the identities has one more, whose configuration both read."""
    repository = REPOSITORIES["identity"](tmp_path / "identity")
    config = text_format.Parse((repository.tis / "identity_any_py" / "config.pbtxt").read_text(), ModelConfig())
    assert ("identity_any_py", [-1]) == (config.name, list(config.input[0].dims))


async def test_every_sender_gets_an_answer_to_every_request() -> None:
    """A bare server, loaded by what is installed: the count is exact, and nothing is wrong."""
    raw = [sender for sender in (*available_senders(), GrpcAio()) if not isinstance(sender, TritonClient)]
    with running_floor() as floor:
        rows = await measure([IDENTITY], [_candidate(floor)], raw, Plan(1, 0.02, 50), lambda line: None)
    assert len(IDENTITY.shapes) * len(raw) == len(rows)
    assert [()] * len(rows) == [row.problems for row in rows]
    assert all(row.num_requests > 0 and row.rate_per_s > 0 and row.num_errors == 0 for row in rows)


@pytest.mark.skipif(not shutil.which("h2load"), reason="h2load is not installed")
async def test_h2load_counts_the_bytes_of_answers() -> None:
    """Prefix and message of each."""
    payload = Payload("m", IDENTITY.make_payloads()[0].inputs)
    with running_floor() as floor:
        sent = await H2Load().send(floor.grpc, [payload], Shape(2, 3), 20)
    assert 20 * (5 + len(payload.data)) == sent.num_body_bytes
    assert 20 == len(sent.load.latencies_s)


async def test_calls_that_fail_are_errors_by_status() -> None:
    """Both clients name the status of a call that nobody takes."""
    payloads = IDENTITY.make_payloads()
    for sender in (TritonClient(), GrpcAio()):
        sent = await sender.send("127.0.0.1:1", payloads, Shape(1, 1), 2)
        assert {grpc.StatusCode.UNAVAILABLE.name: 2} == sent.load.errors


async def test_a_burst_is_counted_by_status() -> None:
    """Every call is in the count, over one channel and over many."""
    with running_floor() as floor:
        rows = [await run_burst(_candidate(floor), burst) for burst in (Burst(60, 1), Burst(60, 3))]
    assert [{"OK": 60}] * 2 == [row.statuses for row in rows]
    assert "60 OK" in burst_table(rows)
    assert not BurstRow("s", 1, 1, {"INTERNAL": 1}, 1.0, 1.0).is_good
