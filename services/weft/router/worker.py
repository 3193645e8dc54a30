"""A router as one of several workers behind one port: changes made at one are applied to all."""

import asyncio
import contextlib
import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from weft.base.core import ParameterValue
from weft.base.errors import AlreadyExistsError, UnavailableError, WeftError
from weft.base.observing import settings
from weft.base.observing.logs import get_logger
from weft.language.syntax.file import GraphSource
from weft.router.bandits.exchange import BanditSharing
from weft.router.core import RouterCore
from weft.router.feedback import rewarded
from weft.router.recording import KEY_BYTES, summed
from weft.router.repository.files import VersionFile
from weft.router.repository.lifecycle import GraphLifecycle
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import Graph, GraphTable, GraphVersion
from weft.v2.protocol.wire import statistics_message
from weft.v2.server.metrics import CERTIFICATE_EXPIRY
from weft.v2.server.servicer import Extension, change_settings
from weft.v2.workers.hub import Answer
from weft.v2.workers.link import WorkerLink
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb

_log = get_logger("weft.router.graphs")


def state_of(table: GraphTable, lifecycle: GraphLifecycle) -> dict[str, Any]:
    """State to hand over, as JSON values: what is served, wanted, unloaded and available for rollback."""
    return {
        "files": {name: [_file(file) for file in files] for name, files in lifecycle.files.items()},
        "graphs": {name: _graph(graph) for name, graph in table.graphs.items()},
    }


async def take_over(state: Mapping[str, Any], table: GraphTable, lifecycle: GraphLifecycle) -> None:
    """Load a sibling's graphs instead of the repository's; failed ones are tried again later.

    Raises UnavailableError if the repository cannot be read.
    """
    async with lifecycle.lock:
        await lifecycle.scan()  # for faults of folders
        lifecycle.files.update({name: [_file_from(*file) for file in files] for name, files in state["files"].items()})
        serving: list[GraphVersion] = []
        pending: dict[GraphVersion, GraphSource] = {}
        for name, given in state["graphs"].items():
            graph = table.graphs[name] = Graph()
            for version in given["versions"]:
                entry = graph.entry(_file_from(*version["file"]))
                if version["is_wanted"]:
                    entry.candidate = _source_from(entry, version["serving"])
                    serving.append(entry)
                if version["candidate"] is not None and (source := _source_from(entry, version["candidate"])):
                    pending[entry] = source
                entry.is_wanted, entry.is_gone = version["is_wanted"], version["is_gone"]
                entry.reason = version["reason"]
        await lifecycle.settle(serving)
        for entry, source in pending.items():
            entry.candidate = source
        await lifecycle.settle(pending)
        for name, given in state["graphs"].items():
            table.graphs[name].previous = await _previous(name, given["previous"], lifecycle)
        table.choose_defaults()


async def _previous(
    name: str, given: Mapping[str, Any] | None, lifecycle: GraphLifecycle
) -> dict[str, ServingGraph] | None:
    """The definition that a rollback restores; None if it no longer compiles."""
    if given is None:
        return None
    try:
        return {
            version: await lifecycle.made(GraphSource(b64decode(text), file, name, version))
            for version, (text, file) in given.items()
        }
    except WeftError as error:
        _log.warning("graph '%s' cannot be rolled back here: %s", name, error.message)
        return None


def _graph(graph: Graph) -> dict[str, Any]:
    previous = graph.previous
    return {
        "versions": [
            {
                "file": _file(entry.file),
                "is_wanted": entry.is_wanted,
                "is_gone": entry.is_gone,
                "reason": entry.reason,
                "serving": None if entry.serving is None else _source(entry.serving.source),
                "candidate": None if entry.candidate is None else _source(entry.candidate),
            }
            for entry in graph.versions.values()
        ],
        "previous": previous and {version: _source(serving.source) for version, serving in previous.items()},
    }


def _file(file: VersionFile) -> tuple[str, str, str, tuple[int, int, int]]:
    return file.name, file.version, str(file.path), file.stamp


def _file_from(name: str, version: str, path: str, stamp: tuple[int, int, int]) -> VersionFile:
    ctime_ns, size_bytes, inode = stamp
    return VersionFile(name, version, Path(path), (ctime_ns, size_bytes, inode))


def _source(source: GraphSource) -> tuple[str, str]:
    text = source.text.encode() if isinstance(source.text, str) else source.text
    return b64encode(text).decode(), source.file


def _source_from(entry: GraphVersion, given: tuple[str, str] | None) -> GraphSource | None:
    return None if given is None else GraphSource(b64decode(given[0]), given[1], entry.file.name, entry.file.version)


#: Families that are no sums over workers: what one of them has, they all have.
GREATEST = (
    CERTIFICATE_EXPIRY,
    *("weft_graph_degraded", "weft_graph_load_failed", "weft_endpoint_state", "weft_target_serving_replicas"),
    *("weft_rollout_percent", "weft_rollout_step", "weft_rollout_phase"),
    *("weft_graph_load_failures", "weft_bandit_pulls", "weft_bandit_rewards", "weft_bandit_reward_sum"),
)


class WorkerCore(RouterCore):
    """A router that keeps its state in agreement with its siblings.

    Loads, unloads and rollbacks of graphs are applied by all workers, one after another; those of models are known to
    all when the answer comes. What bandits learn is summed. Feedback for a request is forwarded to the worker that
    answered it. ``ModelStatistics`` are sums over all. A worker that starts beside others takes over their graphs and
    knowledge.
    """

    def __init__(self, link: WorkerLink, *arguments: Any, **options: Any) -> None:
        if link.place.index > 1:
            options["state_dir"] = None  # the first worker writes what all have learned
        options["metrics_from"] = ()  # the parent asks for them: they are no sums over workers
        super().__init__(*arguments, num_workers=link.place.num_workers, **options)
        self._link = link
        self._sharing = BanditSharing(self._runtime.bandits, lambda news: link.tell("learned", news))
        self._state: Mapping[str, Any] | None = None
        self._has_started = asyncio.Event()
        self.siblings = self._feedback_elsewhere
        self._observer.others = self._observed_elsewhere

    async def start(self) -> None:
        """Like ``RouterCore.start``, with the state of siblings if there are any."""
        load, unload = super()._load_graph, super()._unload_graph
        weigh, refresh = super()._change_weights, super().refresh
        await self._link.open(
            {
                "snapshot": self._snapshot,
                "load": self._once_started(lambda body: load(**json.loads(body))),
                "unload": self._once_started(lambda body: unload(**json.loads(body))),
                "weights": self._once_started(lambda body: weigh(graph_pb.SetWeightsRequest.FromString(body))),
                "feedback": self._feedback_here,
                "recording": self._recording_here,
                "statistics": self._statistics_here,
                "observe": self._observed_here,
                "refresh": self._once_started(lambda body: refresh(body.decode())),
                "TraceSetting": lambda body: change_settings(pb.TraceSettingRequest.FromString(body)),
                "LogSettings": lambda body: change_settings(pb.LogSettingsRequest.FromString(body)),
            },
            {"learned": self._sharing.take},
        )
        is_known, snapshot = await self._link.join()
        if snapshot:
            found = json.loads(snapshot)
            self._state = found["graphs"]
            self._sharing.take(json.dumps(found["bandits"]).encode())
            settings.LOG.update(found["log"])
            for model, changes in found["traces"].items():
                settings.TRACE.update(model, changes)
        if self._bandit_file is not None:
            self._bandit_file.is_read = not is_known
        await super().start()
        await self._link.settle()
        self._sharing.publish()
        self._sharing.start()
        self._has_started.set()

    @override
    async def close(self, *, grace_s: float) -> None:
        await self._sharing.close()
        await super().close(grace_s=grace_s)
        await self._link.close()

    @override
    def extension(self) -> Extension:
        return super().extension()._replace(more_statistics=self._statistics_elsewhere)

    async def refresh(self, target: str) -> None:
        """Like ``RouterCore.refresh``, also at the siblings that answer within 2 s; the others find out by polling."""
        with contextlib.suppress(UnavailableError):  # the parent is gone: this worker ends
            await asyncio.gather(super().refresh(target), self._link.ask("refresh", target.encode()))

    @override
    async def pass_on_settings(self, request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> None:
        await self._link.ask(type(request).__name__.removesuffix("Request"), request.SerializeToString())
        await super().pass_on_settings(request)

    @override
    async def _change_model(self, name: str, change: Callable[[str], Awaitable[None]], new_at: str = "") -> bool:
        await self._has_started.wait()
        return await super()._change_model(name, change, new_at)

    @override
    async def _load_graph(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a graph at every worker. Raises UnavailableError if another one could not; it can be done again."""
        # Of parameters that are not supported only the names count.
        body = json.dumps({"name": name, "parameters": dict(parameters)}, default=lambda _: "").encode()
        self._check(await self._link.change("load", body))

    @override
    async def _unload_graph(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph at every worker. Raises as ``_load_graph``."""
        body = json.dumps({"name": name, "unload_dependents": unload_dependents}).encode()
        self._check(await self._link.change("unload", body))

    @override
    async def _change_weights(self, request: graph_pb.SetWeightsRequest) -> None:
        """Change them at every worker. Raises as ``_load_graph``."""
        self._check(await self._link.change("weights", request.SerializeToString()))

    async def _load_at_start(self) -> None:
        if self._state is None:
            await super()._load_at_start()
            return
        await take_over(self._state, self._graphs, self._lifecycle)
        self._state = None

    def _check(self, answers: Sequence[Answer]) -> None:
        failures = {worker: error for worker, _, error in answers if error is not None}
        if (own := failures.get(self._link.place.index)) is not None:
            raise own
        if failures:
            worker, error = min(failures.items())
            raise UnavailableError(
                f"worker {worker} of {self._link.place.num_workers} failed, send it again: {error.message}"
            )

    def _once_started(self, change: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], Awaitable[bytes]]:
        async def handle(body: bytes) -> bytes:
            await self._has_started.wait()
            await change(body)
            return b""

        return handle

    def _snapshot(self, _: bytes) -> bytes:
        state = {
            "graphs": state_of(self._graphs, self._lifecycle),
            "bandits": json.loads(self._sharing.snapshot()),
            "log": settings.LOG.given,
            "traces": settings.TRACE.given,
        }
        return json.dumps(state).encode()

    def _feedback_here(self, body: bytes) -> bytes:
        request, since_ns = graph_pb.GraphFeedbackRequest.FromString(body[8:]), int.from_bytes(body[:8])
        return rewarded(self._runtime.bandits, request, since_ns).SerializeToString()

    async def _feedback_elsewhere(
        self, request: graph_pb.GraphFeedbackRequest, since_ns: int
    ) -> graph_pb.GraphFeedbackResponse | None:
        answers = await self._link.ask("feedback", since_ns.to_bytes(8) + request.SerializeToString())
        for answer in answers:
            if answer.error is None:
                return graph_pb.GraphFeedbackResponse.FromString(answer.payload)
        for answer in answers:
            is_late = isinstance(answer.error, UnavailableError) and not since_ns
            if answer.error is not None and (is_late or isinstance(answer.error, AlreadyExistsError)):
                raise answer.error
        return None

    def _observed_here(self, body: bytes) -> bytes:
        return self._observer.observe_here(graph_pb.ObserveRequest.FromString(body)).SerializeToString()

    async def _observed_elsewhere(self, request: graph_pb.ObserveRequest) -> list[graph_pb.ObserveResponse]:
        answers = await self._link.ask("observe", request.SerializeToString())
        return [graph_pb.ObserveResponse.FromString(one.payload) for one in answers if one.error is None]

    @override
    async def record(self, request: graph_pb.RecordingRequest) -> graph_pb.RecordingResponse:
        """At every worker, one file each. Raises UnavailableError if one could not."""
        body = json.dumps([request.SerializeToString().hex(), secrets.token_hex(KEY_BYTES)]).encode()
        answers = await self._link.change("recording", body)
        self._check(answers)
        return summed(graph_pb.RecordingResponse.FromString(answer.payload) for answer in answers)

    async def _recording_here(self, body: bytes) -> bytes:
        request, key = map(bytes.fromhex, json.loads(body))
        response = await self._recordings.answer(graph_pb.RecordingRequest.FromString(request), key)
        return response.SerializeToString()

    def _statistics_here(self, body: bytes) -> bytes:
        name, version = json.loads(body)
        entries = map(statistics_message, self.statistics(name, version))
        return pb.ModelStatisticsResponse(model_stats=entries).SerializeToString()

    async def _statistics_elsewhere(self, name: str, version: str) -> list[pb.ModelStatistics]:
        answers = await self._link.ask("statistics", json.dumps([name, version]).encode())
        return [
            entry
            for answer in answers
            if answer.error is None
            for entry in pb.ModelStatisticsResponse.FromString(answer.payload).model_stats
        ]
