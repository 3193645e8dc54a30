"""Sends recorded requests again, and compares what comes with what came, or one target with another."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.authoring.graph import Graph
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.changes.comparison import DEFAULT, Comparison, Outcome, outcome_of
from weft.changes.report import Report
from weft.v2.client.answer import PATH_HEADER
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.recording import call_of_record, read_recording
from weft_protos import recording_pb2 as pb

#: So many requests go to one target before they go to the other, so that neither has the other's load.
_BLOCK = 1024


class Recorded(NamedTuple):
    """What some files have.

    Attributes:
        records: In the order of their arrival.
        num_withheld: Records that cannot be sent again, because what they need was left out or hashed.
        unknown: Names that were left out or hashed; such outputs cannot be compared.
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
        entries = list(read_recording(path))
        unknown.update(entries[0].header.omitted, entries[0].header.hashed)
        records += [entry.record for entry in entries if entry.HasField("record")]
        cut += [] if entries[-1].HasField("end") else [path]
    whole = sorted((one for one in records if not one.withheld), key=lambda one: one.arrival_unix_ns)
    if not whole:
        raise InvalidArgumentError(f"of {len(records)} recorded requests none has all of its inputs, to be sent again")
    return Recorded(whole, len(records) - len(whole), unknown, cut)


class Target(NamedTuple):
    """Where requests go.

    Attributes:
        ask: Gives all responses, of a stream if the flag says so; fills the trailing metadata.
        cpu_s: CPU time that it has used so far; None: unknown.
    """

    label: str
    name: str
    version: str
    ask: Callable[[InferCall, CallContext, bool], Awaitable[list[InferResult]]]
    cpu_s: Callable[[], float | None]


@contextlib.asynccontextmanager
async def local_target(graph: Graph, label: str) -> AsyncGenerator[Target, None]:
    """A graph in this process, with the models of its repository. Raises WeftError."""
    async with graph.loaded() as loaded:

        async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
            if is_stream:
                return [result async for result in loaded.target.stream_infer(call, context)]
            return [await loaded.target.infer(call, context)]

        yield Target(label, graph.name, "", ask, time.process_time)


def served_target(client: V2Client, name: str, version: str, cpu_s: Callable[[], float | None]) -> Target:
    """A graph or model of a server."""

    async def ask(call: InferCall, context: CallContext, is_stream: bool) -> list[InferResult]:
        timeout_s = None if context.deadline_ns is None else (context.deadline_ns - time.monotonic_ns()) / 1e9
        trailer, metadata = dict[str, str](), tuple(context.headers.items())
        if is_stream:
            return [one async for one in client.stream(call, timeout_s=timeout_s, metadata=metadata)]
        try:
            return [await client.infer(call, timeout_s=timeout_s, metadata=metadata, trailer=trailer)]
        finally:
            context.trailing_metadata.extend(trailer.items())

    return Target(f"{name}/{version}".rstrip("/"), name, version, ask, cpu_s)


async def replay(
    records: Sequence[pb.Record],
    targets: Sequence[Target],
    show: Callable[[], None] = lambda: None,
    *,
    concurrency: int = 32,
    pace: float = 0.0,
    times: int = 1,
    comparison: Comparison = DEFAULT,
) -> Report:
    """Send records to one target, and compare with what was recorded, or to two, and compare these.

    Args:
        show: Called after each answer.
        concurrency: Requests in flight at once, as fast as it goes.
        pace: 1: each as long after the first as it came, 2: in half the time; 0: as fast as it goes, without timeouts.
        times: How often all are sent.
    """
    labels = [target.label for target in targets]
    report = Report(labels if len(targets) > 1 else ["recorded", *labels], comparison)
    places = asyncio.Semaphore(concurrency)

    async def asked(target: Target, block: Sequence[pb.Record]) -> list[Outcome]:
        begin_s, begin_cpu_s = time.monotonic(), target.cpu_s()

        async def one(record: pb.Record) -> Outcome:
            if pace:
                after_s = (record.arrival_unix_ns - block[0].arrival_unix_ns) / 1e9 / pace
                await asyncio.sleep(begin_s + after_s - time.monotonic())
            async with contextlib.nullcontext() if pace else places:
                outcome = await _outcome(target, record, is_timed=pace > 0)
            show()
            return outcome

        outcomes = await asyncio.gather(*map(one, block))
        if begin_cpu_s is not None and not (pace and len(targets) > 1):  # else it is that of both
            report.cpu_s[targets.index(target) + 2 - len(targets)] += (target.cpu_s() or 0) - begin_cpu_s
        return outcomes

    size = len(records) if pace else _BLOCK
    for block in [records[start : start + size] for start in range(0, len(records), size)] * times:
        asking = [asked(target, block) for target in targets]
        sides = await asyncio.gather(*asking) if pace else [await one for one in asking]
        before = sides[0] if len(sides) > 1 else map(outcome_of, block)
        for record, one, other in zip(block, before, sides[-1], strict=True):
            report.add(record, one, other)
    return report


async def _outcome(target: Target, record: pb.Record, *, is_timed: bool) -> Outcome:
    call, begin_ns, outcome = call_of_record(record), time.monotonic_ns(), Outcome()
    parameters = {name: value for name, value in call.parameters.items() if is_timed or name != "timeout"}
    call = replace(call, model_name=target.name, model_version=target.version, parameters=parameters)
    context = CallContext(begin_ns + record.timeout_ns if is_timed and record.timeout_ns else None, dict(record.header))
    try:
        outcome.results = [one for one in await target.ask(call, context, record.is_stream) if not one.is_null]
    except WeftError as error:
        outcome.status, outcome.message = error.code, error.message
    outcome.duration_ns = time.monotonic_ns() - begin_ns
    outcome.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
    return outcome
