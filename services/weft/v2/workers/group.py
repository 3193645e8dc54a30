"""The parent process of a service's workers."""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from typing_extensions import override

from weft.base.errors import UnavailableError, WeftError
from weft.base.observing import logs
from weft.base.processes.process import RestartPolicy, ServiceProcess, reserve_port
from weft.v2.client.wires import WireName
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.listening import Ports, WorkerPlace, host_and_port
from weft.v2.server.metrics import MetricSums, serve_metrics
from weft.v2.server.server import METRICS_WAIT_S, stop_event, tell_lost
from weft.v2.server.unix_socket import UnixSocket
from weft.v2.workers.hub import Hub

#: Longest pause between two pings of a worker, and how long each may take, in seconds.
PING_PERIOD_S = 1.0
#: A worker aborts by itself when its loop hangs; one that cannot is killed so much later at most, in seconds: when even
#: its watchdog, which a library that holds the GIL can delay, has had its time to write stacks.
_LATER_S = 6.0
#: A worker that has not answered at all is killed after so long, in seconds.
_START_S = 60.0
#: A worker drains its server and then closes its core, each within the grace period.
_NUM_GRACES, _MORE_S = 2, 5.0

_log = logs.get_logger("weft.workers")


def run_group(
    service: str,
    command: Sequence[str],
    options: argparse.Namespace,
    *,
    greatest: Collection[str],
    collectors: Sequence[Collector] = (),
) -> int:
    """Serve with several processes until stopped; return the exit status: 0, or 1 if a worker failed.

    Args:
        command: Program and arguments of the service; each worker also gets ``--worker`` and its addresses.
    """
    logs.configure(options.log_level, service)
    return asyncio.run(_Group(service, command, options, greatest, collectors).run())


class _Ports:
    """What the parent opens for its workers: the reserved port, the common metrics port, the Unix socket."""

    def __init__(self, options: argparse.Namespace, registry: CollectorRegistry) -> None:
        self._options = options
        self._registry = registry
        self._shares_ports = options.share_ports or options.take_over
        self._metrics_port = 0
        self.unix_socket: socket.socket | None = None
        with contextlib.ExitStack() as opened:
            files = server_tls_files(options)
            self._tls = None if files is None else ServerTls(files)
            self.grpc_port = opened.enter_context(self._reserve()).getsockname()[1]
            # A server of grpcio takes no socket that listens already.
            path = options.unix_socket if options.wire is WireName.WEFT else None
            self._path = None if path is None else UnixSocket(path, takes_over=options.take_over)
            if self._path is not None:
                self.unix_socket = opened.enter_context(self._path.listen())
                opened.callback(self._path.remove)
            if not options.take_over:
                self._open()
            self._opened = opened.pop_all()

    def publish(self) -> Ports:
        if self._options.take_over:
            self._open()
        host = self._options.host
        return Ports(host_and_port(host, self.grpc_port), host_and_port(host, self._metrics_port))

    def close(self) -> None:
        self._opened.close()

    def _reserve(self) -> socket.socket:
        options = self._options
        try:
            return reserve_port(options.host, options.grpc_port, is_shared=self._shares_ports)
        except OSError as error:
            raise self._taken("--grpc-port", options.grpc_port, error) from error

    def _open(self) -> None:
        options = self._options
        try:
            self._metrics_port = serve_metrics(
                self._registry, options.host, options.metrics_port, self._tls, shares_port=self._shares_ports
            )
        except OSError as error:
            raise self._taken("--metrics-port", options.metrics_port, error) from error
        if self._path is not None:
            self._path.publish()

    def _taken(self, option: str, port: int, error: OSError) -> UnavailableError:
        address = host_and_port(self._options.host, port)
        return UnavailableError(f"cannot listen on {address}: {error.strerror}; choose another {option}")


@dataclass
class _Worker:
    """One place in the group; ``serving`` is set when it has served first, ``has_failed`` if it ended before that."""

    process: ServiceProcess | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    num_restarts: int = 0
    is_up: bool = False
    has_failed: bool = False
    serving: asyncio.Event = field(default_factory=asyncio.Event)


class _Group(Collector):
    def __init__(
        self,
        service: str,
        command: Sequence[str],
        options: argparse.Namespace,
        greatest: Collection[str],
        collectors: Sequence[Collector] = (),
    ) -> None:
        self._service = service
        self._command = command
        self._options = options
        self._workers = {index: _Worker() for index in range(1, options.workers + 1)}
        self._hub = Hub(self._kill)
        self._sums = MetricSums(greatest)
        self._collectors = collectors
        self._failed = asyncio.Event()
        self._is_stopping = False

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        stop = stop_event(watch_stdin=self._options.stop_with_stdin, end_now=self._end_now)
        registry = CollectorRegistry()
        for collector in (self, *self._collectors):
            registry.register(collector)
        try:
            ports = _Ports(self._options, registry)
        except WeftError as error:
            _log.error("cannot serve: %s", error.message)
            return 1
        with contextlib.closing(ports):
            keepers = [asyncio.create_task(self._keep(index, ports)) for index in self._workers]
            stopping = asyncio.create_task(stop.wait())
            failing = asyncio.create_task(self._failed.wait())
            serving = asyncio.create_task(self._all_serving())
            await asyncio.wait((serving, stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._failed.is_set():
                self._announce(ports)
                await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            serving.cancel()
            return await self._stop(keepers)

    def _announce(self, ports: _Ports) -> None:
        try:
            endpoints = {"service": self._service} | ports.publish()._asdict()
        except WeftError as error:
            _log.error("cannot serve: %s", error.message)
            self._failed.set()
            return
        print(json.dumps(endpoints), file=sys.__stdout__, flush=True)
        _log.info("serving", extra=endpoints | {"num_workers": len(self._workers)})

    async def _keep(self, index: int, ports: _Ports) -> None:
        worker = self._workers[index]
        try:
            while not self._is_stopping:
                has_served = await self._run_once(index, ports)
                if self._is_stopping:
                    return
                if not (has_served or worker.serving.is_set()):
                    worker.has_failed = True
                    if self._options.take_over or all(one.has_failed for one in self._workers.values()):
                        _log.error("%s", self._describe(index))
                        self._failed.set()
                        return
                pause_s = worker.policy.died()
                _log.error("%s", self._describe(index), extra={"again_in_s": round(pause_s, 1)})
                await asyncio.sleep(pause_s)
                if not self._is_stopping:
                    worker.num_restarts += 1
        except Exception:
            _log.exception("worker %d is not kept running any more", index)
            self._failed.set()

    async def _all_serving(self) -> None:
        for worker in self._workers.values():
            await worker.serving.wait()

    async def _run_once(self, index: int, ports: _Ports) -> bool:
        worker = self._workers[index]
        ours, its = socket.socketpair()
        listens_late = any(one.is_up for one in self._workers.values())
        unix_descriptor = -1 if ports.unix_socket is None else ports.unix_socket.fileno()
        place = WorkerPlace(index, len(self._workers), its.fileno(), listens_late, unix_descriptor)
        command = [
            *self._command, f"--worker={place}", "--grpc-port", str(ports.grpc_port), "--share-ports",
            "--stop-with-stdin",
        ]  # fmt: skip
        passed = [its.fileno(), *([unix_descriptor] if unix_descriptor >= 0 else [])]
        process = worker.process = ServiceProcess(
            f"worker {index}", command, self._log_line, pass_fds=passed, own_group=False
        )
        with its:
            await process.start()
        peer = self._hub.peer(index)
        await peer.connect(ours)
        tasks = [
            asyncio.create_task(peer.run()),
            asyncio.create_task(self._note_serving(worker, process)),
            asyncio.create_task(self._kill_hung(index, process)),
        ]
        try:
            await process.wait()
        finally:
            has_served = worker.is_up
            for task in tasks:
                task.cancel()
            worker.is_up = False
            self._hub.leave(index)
            self._sums.end(index)
        return has_served

    async def _note_serving(self, worker: _Worker, process: ServiceProcess) -> None:
        await process.endpoint()
        worker.is_up = True
        worker.policy.serves()
        worker.serving.set()

    async def _kill_hung(self, index: int, process: ServiceProcess) -> None:
        """Kill a worker when it hangs, if there is a limit; one that has not served yet may be importing."""
        abort_s = self._options.watchdog_abort_s
        hung_s = abort_s + min(abort_s, _LATER_S)
        period_s, limit_s = min(PING_PERIOD_S, abort_s / 4), max(hung_s, _START_S)
        worker = self._workers[index]
        silent_s = 0.0
        now_s = asyncio.get_running_loop().time
        while abort_s and silent_s < limit_s:
            asked_s = now_s()
            await asyncio.sleep(period_s)
            (answer,) = await self._hub.answers("ping", of=[index], timeout_s=period_s)
            if worker.is_up:
                limit_s = hung_s
            if answer.error is None:
                silent_s, limit_s = 0.0, hung_s
            else:
                silent_s += min(now_s() - asked_s, 3 * period_s)  # if longer, this process did not run
        if abort_s:
            _log.error("worker %d has not answered for %g s and is killed", index, limit_s)
            process.kill()

    def _describe(self, index: int) -> str:
        process = self._workers[index].process
        return f"worker {index} was not started" if process is None else process.describe_exit()

    def _log_line(self, _: str, pid: int, line: str) -> None:
        logs.forward(line, self._service, pid)

    def _kill(self, index: int) -> None:
        process = self._workers[index].process
        if process is not None:
            process.kill()

    def _end_now(self) -> None:
        for index in self._workers:
            self._kill(index)
        os._exit(1)

    async def _stop(self, keepers: Sequence["asyncio.Task[None]"]) -> int:
        self._is_stopping = True
        grace_s = self._options.grace_s
        _log.info("stopping", extra={"service": self._service, "grace_s": grace_s})
        processes = [worker.process for worker in self._workers.values() if worker.process is not None]
        running = [process for process in processes if process.is_running]
        # Only the exit status of those that serve now counts: one that is stopped while it starts has no handler of its
        # own yet, and one that died just before would have been started again.
        serving = [worker.process for worker in self._workers.values() if worker.process is not None and worker.is_up]
        serving = [process for process in serving if not process.has_ended()]
        for process in running:
            process.close_stdin()
        ends = [asyncio.create_task(process.wait()) for process in running]
        if ends:
            _, late = await asyncio.wait(ends, timeout=_NUM_GRACES * grace_s + _MORE_S)
            for process in running:
                if process.is_running:
                    _log.error("%s did not end in time and is killed", process.name)
                    process.kill()
            if late:
                await asyncio.wait(late)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        if lost := "; ".join(f"{process.name}: {process.lost}" for process in processes if process.lost):
            tell_lost(lost)
        failed = [process for process in serving if process.exit_status]
        for process in failed:
            _log.error("%s", process.describe_exit())
        return int(bool(failed) or self._failed.is_set())

    @override
    def collect(self) -> Iterator[Metric]:
        """The metrics of all workers as one, and which of them answer; on the thread of the scrape."""
        yield from asyncio.run_coroutine_threadsafe(self._metrics(), self._loop).result(METRICS_WAIT_S)

    async def _metrics(self) -> list[Metric]:
        answers = await self._hub.answers("metrics")
        answered = {answer.worker for answer in answers if answer.error is None}
        for answer in answers:
            if answer.error is None:
                self._sums.update(answer.worker, answer.payload)
        up = GaugeMetricFamily("weft_worker_up", "1: the worker answers", labels=("worker",))
        restarts = CounterMetricFamily(
            "weft_worker_restarts", "Times that a worker was started again", labels=("worker",)
        )
        for index, worker in self._workers.items():
            up.add_metric((str(index),), int(index in answered))
            restarts.add_metric((str(index),), worker.num_restarts)
        return [*self._sums.families(), up, restarts]
