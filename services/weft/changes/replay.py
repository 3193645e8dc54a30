"""Sends recorded requests again, and compares what comes with what came, or one target with another."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from weft.authoring.graph import Graph
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.changes.comparison import Comparison, Outcome, outcome_of
from weft.changes.report import Report
from weft.v2.client.answer import PATH_HEADER
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.recording import call_of_record, read_recording
from weft_protos import recording_pb2 as pb

#: So many requests go to one target before they go to the other, so that neither has the other's load.
_BLOCK = 1024
#: Left out unless requests come at their pace: it was for another load.
_TIMEOUT = "timeout"


class Recorded(NamedTuple):
    """What some files have.

    Attributes:
        records: In the order of their arrival.
        num_withheld: Records that cannot be sent again, because what they need was left out or hashed.
        unknown: Outputs that were left out or hashed, and cannot be compared.
        cut: Files whose recorder was killed; at most its last second is lost.
    """

    records: list[pb.Record]
    num_withheld: int
    unknown: set[str]
    cut: list[Path]


def read_records(paths: Iterable[Path]) -> Recorded:
    """Read recordings. Raises as ``read_recording``; InvalidArgumentError if no request can be sent again."""
    records, unknown, cut = list[pb.Record](), set[str](), list[Path]()
    for path in paths:
        entry = pb.Entry()
        for entry in read_recording(path):
            unknown.update(entry.header.omitted, entry.header.hashed)
            if entry.HasField("record"):
                records.append(entry.record)
        if not entry.HasField("end"):
            cut.append(path)
    whole = sorted((one for one in records if not one.withheld), key=lambda one: one.arrival_unix_ns)
    if not whole:
        why = "inputs are left out or hashed in all of them" if records else "there is none"
        raise InvalidArgumentError(f"no request of the recording can be sent again: {why}")
    return Recorded(whole, len(records) - len(whole), unknown, cut)


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        label: Its name in reports.
        ask: Gives all responses; a flag says whether several are asked for. Fills the trailing metadata.
        cpu_s: CPU time that it has used so far; None: unknown.
    """

    label: str
    name: str
    version: str
    ask: Callable[[InferCall, CallContext, bool], Awaitable[list[InferResult]]]
    cpu_s: Callable[[], float | None] = lambda: None


@contextlib.asynccontextmanager
async def local_target(graph: Graph, label: str = "") -> AsyncGenerator[Target, None]:
    """A graph in this process, with the models of its repository. Raises WeftError."""
    async with graph.loaded() as loaded:

        async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
            if is_stream:
                return [result async for result in loaded.target.stream_infer(call, context)]
            return [await loaded.target.infer(call, context)]

        yield Target(label or graph.name, graph.name, "", ask, time.process_time)


def served_target(
    client: V2Client, name: str, version: str = "", cpu_s: Callable[[], float | None] = lambda: None
) -> Target:
    """A graph or model of a server."""

    async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
        timeout_s = None if context.deadline_ns is None else (context.deadline_ns - time.monotonic_ns()) / 1e9
        trailer: dict[str, str] = {}
        metadata = tuple(context.headers.items())
        try:
            if is_stream:
                return [one async for one in client.stream(call, timeout_s=timeout_s, metadata=metadata)]
            return [await client.infer(call, timeout_s=timeout_s, metadata=metadata, trailer=trailer)]
        finally:
            context.trailing_metadata.extend(trailer.items())

    return Target(f"{name}/{version}" if version else name, name, version, ask, cpu_s)


@dataclass(frozen=True)
class ReplayOptions:
    """How requests are sent.

    Attributes:
        concurrency: Requests in flight at once.
        pace: 0: as fast as it goes, without timeouts; 1: each as long after the first as it came, 2: in half the time.
        times: How often all are sent.
    """

    concurrency: int = 32
    pace: float = 0.0
    times: int = 1
    comparison: Comparison = field(default_factory=Comparison)


async def replay(
    records: Sequence[pb.Record], targets: Sequence[Target], options: ReplayOptions, show: Callable[[], None]
) -> Report:
    """Send records to one target, or to two, whose answers are then compared; else the recorded ones are.

    Args:
        show: Called after each answer.
    """
    labels = [target.label for target in targets]
    report = Report(labels if len(targets) > 1 else ["recorded", *labels], options.comparison)

    async def asked(target: Target, block: Sequence[pb.Record], begin_s: float) -> list[Outcome]:
        places = asyncio.Semaphore(options.concurrency)

        async def one(record: pb.Record) -> Outcome:
            if options.pace:
                after_s = (record.arrival_unix_ns - records[0].arrival_unix_ns) / 1e9 / options.pace
                await asyncio.sleep(begin_s + after_s - time.monotonic())
                return await _outcome(target, record, show, is_timed=True)
            async with places:
                return await _outcome(target, record, show, is_timed=False)

        begin_cpu_s = target.cpu_s()
        outcomes = await asyncio.gather(*map(one, block))
        if begin_cpu_s is not None:
            report.add_cpu(target.label, (target.cpu_s() or 0) - begin_cpu_s)
        return outcomes

    for _ in range(options.times):
        size = len(records) if options.pace else _BLOCK
        for start in range(0, len(records), size):
            block = records[start : start + size]
            asking = [asked(target, block, time.monotonic()) for target in targets]
            sides = await asyncio.gather(*asking) if options.pace else [await one for one in asking]
            if len(sides) == 1:
                sides.insert(0, list(map(outcome_of, block)))
            for record, before, after in zip(block, *sides, strict=True):
                report.add(record, before, after)
    return report


async def _outcome(target: Target, record: pb.Record, show: Callable[[], None], *, is_timed: bool) -> Outcome:
    call, begin_ns = call_of_record(record), time.monotonic_ns()
    parameters = {name: value for name, value in call.parameters.items() if is_timed or name != _TIMEOUT}
    call = replace(call, model_name=target.name, model_version=target.version, parameters=parameters)
    context = CallContext(begin_ns + record.timeout_ns if is_timed and record.timeout_ns else None, dict(record.header))
    outcome = Outcome()
    try:
        results = await target.ask(call, context, record.is_stream)
        outcome.results = [result for result in results if not result.is_null]
    except WeftError as error:
        outcome.status, outcome.message = error.code, error.message
    outcome.duration_ns = time.monotonic_ns() - begin_ns
    outcome.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
    show()
    return outcome
