"""Rounds in which the servers take turns: answers are checked, then each is loaded and its CPU time read."""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.servers import answers, differences
from benchmarks.wire.candidates import BARE, Candidate
from benchmarks.wire.senders import PREFIX_BYTES, TRITONCLIENT, Sender, Sent
from benchmarks.wire.workloads import Payload, Shape, Workload
from weft.capacity.tuning.load import caller
from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

_NUM_CHECKED = 16
#: Warm-ups before the first run of a cell; each takes this share of a run.
_NUM_WARMUPS, _WARMUP_SHARE = 3, 0.1
#: Statistics may be written a moment after the answer.
_STATISTICS_TIMEOUT_S, _STATISTICS_PERIOD_S = 3.0, 0.05


class Plan(NamedTuple):
    """How much.

    Attributes:
        num_rounds: Of each server with each load.
        duration_s: Of a run, about.
        max_requests: Of a run.
    """

    num_rounds: int
    duration_s: float
    max_requests: int = 50_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    num_requests: int
    num_errors: int
    rate_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds of one server with one load.

    Attributes:
        workload, shape, sender: The load.
        server, arrangement, wire: What was loaded.
        num_requests, num_errors: Of all rounds.
        rate_per_s: Answers per second.
        mean_ms, p50_ms, p99_ms: Latency.
        cpu_s_per_1000: CPU-seconds of all processes of the server for 1000 requests.
        problems: What was wrong; empty if nothing was.
        rounds: Every round by itself.
    """

    workload: str
    shape: str
    sender: str
    server: str
    arrangement: str
    wire: str
    num_requests: int
    num_errors: int
    rate_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float
    problems: tuple[str, ...] = ()
    rounds: list[Measured] = field(default_factory=list)


class Cell(NamedTuple):
    """One server with one load."""

    workload: Workload
    shape: Shape
    sender: Sender
    candidate: Candidate

    def summary(self, rounds: list[Measured]) -> Row:
        """Medians, each figure by itself."""

        def median(name: str) -> float:
            return round(statistics.median(getattr(measured, name) for measured in rounds), 4)

        return Row(
            self.workload.name,
            str(self.shape),
            self.sender.name,
            self.candidate.name,
            self.candidate.arrangement,
            self.candidate.wire,
            sum(measured.num_requests for measured in rounds),
            sum(measured.num_errors for measured in rounds),
            median("rate_per_s"),
            median("mean_ms"),
            median("p50_ms"),
            median("p99_ms"),
            median("cpu_s_per_1000"),
            tuple(dict.fromkeys(problem for measured in rounds for problem in measured.problems)),
            rounds,
        )


class Checked(NamedTuple):
    """What a server answered before it was measured.

    Attributes:
        num_answer_bytes: Of the first payload's answer, serialized.
        problems: How its answers differ from those of the first server.
    """

    num_answer_bytes: int
    problems: tuple[str, ...]


def cells(workloads: Sequence[Workload], candidates: Sequence[Candidate], senders: Sequence[Sender]) -> list[Cell]:
    """Everything to measure, in the order of the table; mixed requests are sent by a sender that sends them all."""
    return [
        Cell(workload, shape, sender, candidate)
        for workload in workloads
        for shape in workload.shapes
        for sender in senders
        if sender.name == TRITONCLIENT or not workload.is_mixed
        for candidate in candidates
        if _takes_part(candidate, workload, sender)
    ]


async def measure(
    workloads: Sequence[Workload],
    candidates: Sequence[Candidate],
    senders: Sequence[Sender],
    plan: Plan,
    report: Callable[[str], None],
) -> list[Row]:
    """One row for each server and load. Raises AioRpcError or RuntimeError if a server cannot be loaded at all."""
    payloads = {workload.name: workload.make_payloads() for workload in workloads}
    checked: dict[tuple[str, str], Checked] = {}
    for workload in workloads:
        checked |= await _check(workload, candidates, payloads[workload.name], report)
    todo = cells(workloads, candidates, senders)
    rounds: dict[Cell, list[Measured]] = defaultdict(list)
    rates_per_s: dict[Cell, float] = {}
    for number in range(plan.num_rounds):
        for cell in _turns(todo, is_reversed=number % 2 == 1):
            found = checked[cell.workload.name, cell.candidate.name]
            measured = await _run(cell, payloads[cell.workload.name], found, plan, rates_per_s)
            rounds[cell].append(measured)
            report(
                f"round {number + 1}, {cell.workload}, {cell.shape}, {cell.sender.name}, {cell.candidate.name}: "
                f"{measured.rate_per_s:.0f}/s, {measured.cpu_s_per_1000:.3f}"
                + "".join(f"; {p}" for p in measured.problems)
            )
    return [cell.summary(rounds[cell]) for cell in todo]


def _takes_part(candidate: Candidate, workload: Workload, sender: Sender) -> bool:
    """Bare servers give back the request, which is no answer for a client that reads it."""
    return candidate.arrangement != BARE or (workload.with_floors and sender.name != TRITONCLIENT)


def _turns(todo: Sequence[Cell], *, is_reversed: bool) -> Iterator[Cell]:
    """Load after load; the servers of each in this order, or in the other."""
    groups: dict[tuple[str, Shape, str], list[Cell]] = defaultdict(list)
    for cell in todo:
        groups[cell.workload.name, cell.shape, cell.sender.name].append(cell)
    for group in groups.values():
        yield from reversed(group) if is_reversed else group


async def _check(
    workload: Workload, candidates: Sequence[Candidate], payloads: Sequence[Payload], report: Callable[[str], None]
) -> dict[tuple[str, str], Checked]:
    found: dict[tuple[str, str], Checked] = {}
    expected = None
    sent = [payload.data for payload in payloads[:_NUM_CHECKED]]
    for candidate in candidates:
        if candidate.arrangement == BARE and not workload.with_floors:
            continue
        async with open_channel(candidate.server.address, wire=WireName.GRPCIO) as channel:
            answer = await caller(channel)(sent[0])
        if candidate.arrangement == BARE:
            wrong = [] if answer == sent[0] else ["the answer is not the request"]
        else:
            outputs = await answers(candidate.server.address, sent)
            expected = outputs if expected is None else expected
            wrong = differences(expected, outputs)
        problems = (f"{len(wrong)} wrong answers: {wrong[0]}",) if wrong else ()
        found[workload.name, candidate.name] = Checked(len(answer), problems)
        report(f"{workload}, {candidate.name}: {problems[0] if problems else f'{len(sent)} answers are right'}")
    return found


async def _run(
    cell: Cell, payloads: Sequence[Payload], checked: Checked, plan: Plan, rates_per_s: dict[Cell, float]
) -> Measured:
    server = cell.candidate.server
    rate_per_s, num_before = rates_per_s.get(cell, 0.0), await _num_succeeded(cell, at_least=0)
    for _ in range(1 if rate_per_s else _NUM_WARMUPS):  # the first connection of all says little of the rate
        num_warmups = int(max(2 * cell.shape.num_inflight, rate_per_s * plan.duration_s * _WARMUP_SHARE))
        warmup = await cell.sender.send(server.address, payloads, cell.shape, num_warmups)
        rate_per_s = warmup.load.rate_per_s
        num_before = await _num_succeeded(cell, at_least=num_before + len(warmup.load.latencies_s))
    num_requests = min(plan.max_requests, max(2 * cell.shape.num_inflight, int(rate_per_s * plan.duration_s)))
    if cell.workload.is_mixed:  # each server gets each request as often
        num_requests = len(payloads) * (2 if cell.shape.num_inflight > 1 else 1)
    before_s = server.cpu_s()
    sent = await cell.sender.send(server.address, payloads, cell.shape, num_requests)
    used_s = server.cpu_s() - before_s
    rates_per_s[cell] = sent.load.rate_per_s
    num_after = await _num_succeeded(cell, at_least=num_before + num_requests)
    problems = faults(sent, num_requests, checked.num_answer_bytes, num_after - num_before)
    load = sent.load
    return Measured(
        num_requests,
        num_requests - min(len(load.latencies_s), num_after - num_before, num_requests),
        load.rate_per_s,
        load.mean_ms,
        load.percentile_ms(50),
        load.percentile_ms(99),
        used_s / num_requests * 1000,
        (*checked.problems, *problems),
    )


def faults(sent: Sent, num_requests: int, num_answer_bytes: int, num_succeeded: int) -> list[str]:
    """What is wrong with a run.

    Args:
        sent: What the sender saw.
        num_requests: How many it was to send.
        num_answer_bytes: Size of each right answer, where the sender sends one request alone.
        num_succeeded: By the server's own statistics.
    """
    found = [f"{count} {status}" for status, count in sent.load.errors.items()]
    if num_succeeded != num_requests:
        found.append(f"the server counts {num_succeeded} successes for {num_requests} requests")
    expected_bytes = num_requests * (PREFIX_BYTES + num_answer_bytes)
    if sent.num_body_bytes not in (None, expected_bytes):
        found.append(f"{sent.num_body_bytes} bytes of answers, not {expected_bytes}")
    return found


async def _num_succeeded(cell: Cell, *, at_least: int) -> int:
    """Requests that the server answered with success, by its statistics; waits a moment for so many.

    Bare servers count nothing: theirs are ``at_least``, and the bytes alone are checked.
    """
    if cell.candidate.arrangement == BARE:
        return at_least
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _STATISTICS_TIMEOUT_S
    async with open_channel(cell.candidate.server.address, wire=WireName.GRPCIO) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        while True:
            answer = await stub.ModelStatistics(pb.ModelStatisticsRequest(name=cell.workload.model))
            count = sum(model.inference_stats.success.count for model in answer.model_stats)
            if count >= at_least or loop.time() > end_s:
                return count
            await asyncio.sleep(_STATISTICS_PERIOD_S)
