"""Sends recorded requests again, and compares what comes with what came, or one target with another."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappush, heappushpop, merge
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from weft.authoring.graph import Graph
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.changes.comparison import DEFAULT, Comparison, Outcome, Report, outcome_of
from weft.v2.client.answer import PATH_HEADER
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.recording import call_of_record, read_recording
from weft_protos import recording_pb2 as pb

#: So many requests go to one target before they go to the other, so that neither has the other's load. Files are in the
#: order in which answers ended, and as many records are held to have them in that of their arrival.
_BLOCK = 1024
#: Requests in flight at a pace; when a target falls so far behind, the next ones are late.
_MAX_INFLIGHT = 4096
#: Larger answers are compared on a thread at a pace, as the times of requests in flight would have that in them.
_MAX_BYTES_ON_LOOP = 1 << 18


class Recorded:
    """The requests of recordings, read anew by each iteration: about in the order of their arrival, and few at a time.

    Attributes:
        num_records, num_withheld: Records that can be sent again, and that cannot, because what they need was left out
            or hashed.
        unknown: Names that were left out or hashed; such outputs cannot be compared.
        cut: Files whose recorder was killed; at most its last two seconds are lost.

    Raises as ``read_recording``; InvalidArgumentError if no request can be sent again.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = [*paths]
        self.num_records, self.num_withheld, self.unknown, self.cut = 0, 0, set[str](), list[Path]()
        for path in self._paths:
            is_ended = False
            for entry in read_recording(path):
                self.unknown.update(entry.header.omitted, entry.header.hashed)
                self.num_withheld += bool(entry.record.withheld)
                self.num_records += entry.HasField("record") and not entry.record.withheld
                is_ended = entry.HasField("end")
            self.cut += [] if is_ended else [path]
        if not self.num_records:
            text = f"of {self.num_withheld} recorded requests none has all of its inputs, to be sent again"
            raise InvalidArgumentError(text)

    def __iter__(self) -> Iterator[pb.Record]:
        held = list[tuple[int, int, pb.Record]]()
        for number, record in enumerate(merge(*map(_whole, self._paths), key=lambda one: one.arrival_unix_ns)):
            entry = record.arrival_unix_ns, number, record
            if len(held) < _BLOCK:
                heappush(held, entry)
            else:
                yield heappushpop(held, entry)[-1]
        yield from (record for *_, record in sorted(held))


def _whole(path: Path) -> Iterator[pb.Record]:
    return (one.record for one in read_recording(path) if one.HasField("record") and not one.record.withheld)


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
    records: Iterable[pb.Record],
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
    places, comparing = asyncio.Semaphore(_MAX_INFLIGHT if pace else concurrency), asyncio.Lock()

    async def asked(target: Target, record: pb.Record) -> Outcome:
        async with contextlib.nullcontext() if pace else places:
            outcome = await _outcome(target, record, is_timed=pace > 0)
        show()
        return outcome

    @contextlib.contextmanager
    def measured(place: int) -> Iterator[None]:
        begin_s = targets[place].cpu_s()
        yield
        if begin_s is not None:
            report.cpu_s[place + 2 - len(targets)] += (targets[place].cpu_s() or 0) - begin_s

    def add(record: pb.Record, *sides: Outcome) -> None:
        report.add(record, sides[0] if len(sides) > 1 else outcome_of(record), sides[-1])

    async def compared(record: pb.Record) -> None:
        sides = await asyncio.gather(*(asked(target, record) for target in targets))
        tensors = (one for side in sides for result in side.results for one in result.outputs.values())
        async with comparing:
            if sum(len(one.data) for one in tensors) > _MAX_BYTES_ON_LOOP:
                await asyncio.to_thread(add, record, *sides)
            else:
                add(record, *sides)
        places.release()

    async def at_pace() -> None:
        source, begin_s, first_ns = iter(records), 0.0, None
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(asyncio.to_thread(list, islice(source, _BLOCK)))
            while block := await reading:
                reading = group.create_task(asyncio.to_thread(list, islice(source, _BLOCK)))
                for record in block:
                    if first_ns is None:
                        begin_s, first_ns = time.monotonic(), record.arrival_unix_ns
                    await places.acquire()
                    await asyncio.sleep(begin_s + (record.arrival_unix_ns - first_ns) / 1e9 / pace - time.monotonic())
                    group.create_task(compared(record))

    async def in_turn() -> None:
        source = iter(records)
        while block := list(islice(source, _BLOCK)):
            sides = []
            for place, target in enumerate(targets):
                with measured(place):
                    sides.append(await asyncio.gather(*(asked(target, record) for record in block)))
            for entry in zip(block, *sides, strict=True):
                add(*entry)

    for _ in range(times):
        with measured(0) if pace and len(targets) == 1 else contextlib.nullcontext():  # of two it would be that of both
            try:
                await (at_pace() if pace else in_turn())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors
    return report


async def _outcome(target: Target, record: pb.Record, *, is_timed: bool) -> Outcome:
    begin_ns, outcome = time.monotonic_ns(), Outcome()
    context = CallContext(begin_ns + record.timeout_ns if is_timed and record.timeout_ns else None, dict(record.header))
    try:
        call = call_of_record(record)
        parameters = {name: value for name, value in call.parameters.items() if is_timed or name != "timeout"}
        call = replace(call, model_name=target.name, model_version=target.version, parameters=parameters)
        outcome.results = [one for one in await target.ask(call, context, record.is_stream) if not one.is_null]
    except WeftError as error:
        outcome.status, outcome.message = error.code, error.message
    outcome.duration_ns = time.monotonic_ns() - begin_ns
    outcome.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
    return outcome
