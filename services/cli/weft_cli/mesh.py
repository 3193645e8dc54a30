"""The four services as local processes: started in order, watched, ended together."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft_cli.preflight import GRAPHS, MeshError, check_port, hold_port, service_folders
from weft_cli.process import Endpoint, ServiceProcess
from weft_cli.readiness import dialable, wait_ready

#: Services that serve models; the folder in the repository has the service's name.
MODEL_SERVICES = ("preprocess", "model", "postprocess")


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """What to start.

    Attributes:
        repository: With the folders graphs, preprocess, model, postprocess; or models and ensembles side by side.
        host: Address that the router listens on; the other services listen on 127.0.0.1.
        router_port, metrics_port: The router's; 0 is any free port.
        start_timeout_s: How long until everything must serve, seconds.
        grace_s: How long a stop may take, seconds.
        router_arguments: More of the router's arguments.
    """

    repository: Path
    host: str = "127.0.0.1"
    router_port: int = 8001
    metrics_port: int = 8002
    start_timeout_s: float = 180.0
    grace_s: float = 20.0
    router_arguments: Sequence[str] = ()


class Mesh:
    """Owner of the child processes.

    Args:
        options: What to start.
        log: Receives (service name, line) of everything the services log.
        report: Receives messages for the person who started the mesh.
    """

    def __init__(self, options: MeshOptions, log: Callable[[str, str], None], report: Callable[[str], None]) -> None:
        self._options = options
        self._log = log
        self._report = report
        self._processes: dict[str, ServiceProcess] = {}
        self._has_lost_one = False

    async def start(self) -> dict[str, Endpoint]:
        """Every service is SERVING; endpoints by service name, the router first.

        A service whose folder is not in the repository is not started.

        Raises:
            MeshError: Something is missing, in use or not ready. What was started still runs: call ``stop``.
        """
        options = self._options
        folders = service_folders(options.repository, MODEL_SERVICES)
        check_port(options.host, options.metrics_port)
        deadline_s = asyncio.get_running_loop().time() + options.start_timeout_s
        names = [name for name in MODEL_SERVICES if name in folders]
        with hold_port(options.host, options.router_port) as held:  # models call other models through the router
            router_port = held.getsockname()[1]
            host = f"[{options.host}]" if ":" in options.host else options.host
            router = ["--router", dialable(f"{host}:{router_port}")]
            for name in names:
                repository = ["--repository", str(folders[name])]
                await self._spawn(name, [*repository, *self._listen("127.0.0.1", 0, 0), *router])
            endpoints = await self._all_serving(names, deadline_s)
        await self._spawn(
            "router",
            [
                "--repository",
                str(folders[GRAPHS]),
                *self._listen(options.host, router_port, options.metrics_port),
                *(f"--target={name}={endpoint.grpc}" for name, endpoint in endpoints.items()),
                *options.router_arguments,
            ],
        )
        return await self._all_serving(["router"], deadline_s) | endpoints

    async def watch(self) -> None:
        """Report each service that dies; returns when none is left. Cancel it before ``stop``."""
        waiting = {asyncio.create_task(process.wait()): process for process in self._processes.values()}
        try:
            while waiting:
                ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                died = [waiting.pop(task) for task in ended]
                self._has_lost_one = True
                rest = ", ".join(process.name for process in waiting.values())
                for process in died:
                    self._report(process.describe_exit())
                self._report(f"still serving: {rest}" if rest else "no service is left")
        finally:
            for task in waiting:
                task.cancel()

    @property
    def has_ended_well(self) -> bool:
        """Whether no service died and each ended with status 0 when it was asked to; ask after ``stop``."""
        return not self._has_lost_one and all(process.exit_status == 0 for process in self._processes.values())

    async def stop(self) -> None:
        """No process is left.

        The router ends first, so that requests in work can finish; then the others, which a router that hangs leaves
        half of the grace. What is left when the grace has passed, or when this is cancelled, is killed.
        """
        now_s, grace_s = asyncio.get_running_loop().time(), self._options.grace_s
        deadline_s = now_s + grace_s
        processes = list(self._processes.values())
        try:
            for is_router, end_s in ((True, now_s + grace_s / 2), (False, deadline_s)):
                group = [process for process in processes if (process.name == "router") is is_router]
                for process in group:
                    process.send_signal(signal.SIGTERM)
                await _ended(group, end_s)
        finally:
            for process in processes:
                if process.is_running:
                    self._report(f"{process.name} did not end in time and is killed")
                    process.kill()
            await _ended(processes, deadline_s + grace_s)

    def kill(self) -> None:
        """Every process is killed, without a grace."""
        for process in self._processes.values():
            process.kill()

    def _listen(self, host: str, grpc_port: int, metrics_port: int) -> list[str]:
        # A service drains its server, then its models, each within its grace; the router does so before the others.
        grace_s = self._options.grace_s / 4
        return [
            "--stop-with-stdin", "--host", host, "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port),
            "--grace-s", f"{grace_s:g}",
        ]  # fmt: skip

    async def _spawn(self, name: str, arguments: Iterable[str]) -> None:
        # -P: a file in the current folder must not shadow a library.
        command = [sys.executable, "-P", "-m", f"weft_{name}", *arguments]
        process = ServiceProcess(name, command, self._log)
        await process.start()
        self._processes[name] = process

    async def _all_serving(self, names: Iterable[str], deadline_s: float) -> dict[str, Endpoint]:
        """Endpoints of the services, in order; what is wrong with each of them is in the one error raised."""
        names = list(names)
        results = await asyncio.gather(*(self._serving(name, deadline_s) for name in names), return_exceptions=True)
        endpoints: dict[str, Endpoint] = {}
        failures: list[str] = []
        for name, result in zip(names, results, strict=True):
            if isinstance(result, MeshError):
                failures.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                endpoints[name] = result
        if failures:
            cure = [] if "router" in names else ["If model files are missing, run `make models`."]
            raise MeshError("\n".join(failures + cure))
        return endpoints

    async def _serving(self, name: str, deadline_s: float) -> Endpoint:
        process = self._processes[name]
        ready = asyncio.create_task(self._ready(process, deadline_s))
        died = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            raise MeshError(process.describe_exit())
        finally:
            ready.cancel()
            died.cancel()

    async def _ready(self, process: ServiceProcess, deadline_s: float) -> Endpoint:
        try:
            async with asyncio.timeout_at(deadline_s):
                endpoint = await process.endpoint()
        except TimeoutError:
            raise MeshError(
                f"{process.name} is still loading after {self._options.start_timeout_s:g} s; its log is above; "
                "give it longer with --start-timeout-s"
            ) from None
        await wait_ready(process.name, dialable(endpoint.grpc), deadline_s=deadline_s)
        return endpoint


async def _ended(processes: Iterable[ServiceProcess], deadline_s: float) -> None:
    """Every process has ended, or the deadline on the clock of the running loop has passed."""
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        remaining_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        _, pending = await asyncio.wait(waits, timeout=remaining_s)
        for task in pending:
            task.cancel()
