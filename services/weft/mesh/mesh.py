"""``Mesh``: the services as local processes, started in order, watched, and stopped together."""

import asyncio
import os
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from weft.base.observing.logs import get_logger
from weft.base.processes.process import Endpoint, ServiceProcess
from weft.base.repository.layout import is_graph_folder
from weft.mesh.preflight import MeshError, hold_port, internal_access, service_folders, socket_paths, write_mesh_key
from weft.mesh.readiness import dialable, told
from weft.mesh.registry import Rolls, RunningMesh, mesh_folder, publish, publish_rolls
from weft.mesh.service_names import GATEWAY, GRAPHS, MODEL_SERVICES, PAGE, ROUTER
from weft.mesh.supervised import Roll, SupervisedService, Supervision
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.listening import host_and_port
from weft.v2.server.unix_socket import address_of

#: Order on a request's way, which is the order of a stop; the other services come last.
_PLACES = {GATEWAY: 0, PAGE: 0, ROUTER: 1}
_BEHIND = 2
#: Ports of metrics behind that of the router: 8003, 8004, 8012, 8022 and 8032 by default; replicas have the next ones.
_METRICS = {GATEWAY: 1, PAGE: 2, "preprocess": 10, "model": 20, "postprocess": 30}
_MAX_FIXED, _MAX_PORT = 9, 65535

_log = get_logger("weft.mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions(Supervision):
    """Which services to start, and how to supervise them.

    Attributes:
        repository: With the folders graphs, preprocess, model, postprocess; or models and ensembles side by side.
        host: Address that the router listens on; the other services listen on 127.0.0.1.
        router_port, metrics_port: The router's; 0 is any free port, also for the metrics of the other services.
        http_port: Of the gateway, which also listens on ``host``; None: no gateway.
        ui_port: Of the page, on 127.0.0.1; None: no page.
        service_arguments: More arguments of other services, by name; those that the mesh sets win.
        in_process: Services that run in the router's process.
        replicas: Number of processes of a service; 1 if not listed.
        is_encrypted, asks_for_keys: What ``router_arguments`` require of clients; the mesh's own processes then use
            private sockets and keys among themselves.
    """

    repository: Path
    host: str = "127.0.0.1"
    router_port: int = 8001
    metrics_port: int = 8002
    http_port: int | None = None
    ui_port: int | None = None
    router_arguments: Sequence[str] = ()
    service_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    in_process: Collection[str] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)
    is_encrypted: bool = False
    asks_for_keys: bool = False


class Mesh:
    """Owner of the service processes.

    Args:
        log: Receives (service name, process id, line) of everything the services log.
    """

    def __init__(self, options: MeshOptions, log: Callable[[str, int, str], None]) -> None:
        self._options = options
        self._log = log
        self._services: dict[str, SupervisedService] = {}
        self._held = ExitStack()  # every port, so that none is lost to another program while a service is down
        self._was_whole = False
        self._is_watched = False
        self._restarting: asyncio.Task[None] | None = None
        self._folder = self._graphs = self._mesh_key = Path()
        self._rolls = Rolls()

    async def start(self) -> dict[str, Endpoint]:
        """Start every service and wait until it is SERVING; return endpoints by service, router first, gateway last.

        A service without a folder in the repository is not started; one in the router's process has the router's
        endpoint. Replicas after the first have a number behind the name: ``model-2``. Raises MeshError: something is
        missing, in use or not ready. Services that were started still run: call ``stop``.
        """
        options = self._options
        folders = service_folders(options.repository, MODEL_SERVICES)
        deadline_s = asyncio.get_running_loop().time() + options.start_timeout_s
        served = [name for name in MODEL_SERVICES if name in folders]
        names = [name for name in served if name not in options.in_process]
        fused = [name for name in served if name in options.in_process]
        router_port = self._hold(options.host, options.router_port)
        router_metrics_port = self._hold(options.host, options.metrics_port)
        http_port = None if options.http_port is None else self._hold(options.host, options.http_port)
        ui_port = None if options.ui_port is None else self._hold("127.0.0.1", options.ui_port)
        folder = self._folder = self._held.enter_context(mesh_folder())
        self._mesh_key = write_mesh_key(folder)
        self._graphs = folders[GRAPHS]
        replicas = {name: _labels(name, options.replicas.get(name, 1)) for name in names}
        sockets = socket_paths(folder, [name for name in names if len(replicas[name]) == 1])
        access = internal_access(
            folder,
            dialable(host_and_port(options.host, router_port)),
            names,
            is_encrypted=options.is_encrypted,
            asks_for_keys=options.asks_for_keys,
        )
        own_router = ["--router", access.address, *access.service_arguments]  # models call other models through it
        for name in names:
            repository = self._repository_arguments(name, folders[name])
            unix_socket = [f"--unix-socket={sockets[name]}"] if name in sockets else []
            for index, label in enumerate(replicas[name]):
                metrics_port = self._hold_metrics("127.0.0.1", name, label, index)
                listen = self._listen("127.0.0.1", self._hold("127.0.0.1"), metrics_port)
                # The router cancels what its clients cancel; --max-resets-per-s of the user comes later, and holds.
                arguments = ["--max-resets-per-s=0", *repository, *listen, *unix_socket, *own_router]
                self._add(label, arguments, module=f"weft.services.{name}", security=access.service_security)
        endpoints = await self._all_serving([label for name in names for label in replicas[name]], deadline_s)
        addresses = {name: ",".join(endpoints[label].grpc for label in replicas[name]) for name in names}
        addresses |= {name: address_of(path) for name, path in sockets.items()}
        self._add(
            ROUTER,
            [
                "--repository",
                str(folders[GRAPHS]),
                *self._listen(options.host, router_port, router_metrics_port),
                *(
                    f"--in-process={shlex.join([name, *self._repository_arguments(name, folders[name])])}"
                    for name in fused
                ),
                *(f"--target={name}={address}" for name, address in addresses.items()),
                *(f"--metrics-from={source}" for name in names for source in _metrics(replicas[name], endpoints)),
                f"--mesh-key-file={self._mesh_key}",
                *options.router_arguments,
                *access.router_arguments,
            ],
            module="weft.mesh.fused" if fused else "weft.services.router",
            can_hand_over=not any(argument.startswith("--state-dir") for argument in options.router_arguments),
            own_address=access.address,
            security=access.security,
        )
        router = (await self._all_serving([ROUTER], deadline_s))[ROUTER]
        endpoints = {ROUTER: router} | endpoints | {name: endpoints.get(name, router) for name in served}
        if http_port is not None:
            hosts = ["--allow-host=*"] if options.asks_for_keys else []  # a browser has no key
            self._add_gateway(GATEWAY, options.host, http_port, access.address, *hosts)
            endpoints |= await self._all_serving([GATEWAY], deadline_s)
        if ui_port is not None:
            shown = RunningMesh(os.getpid(), options.is_encrypted, endpoints).metrics_addresses().items()
            # A page over TLS has a certificate for others.
            pages = [f"--metrics-from={name}=http://{at}/metrics" for name, at in shown if "://" not in at]
            self._add_gateway(PAGE, "127.0.0.1", ui_port, access.address, "--ui", *pages)
            endpoints |= await self._all_serving([PAGE], deadline_s)
        try:
            publish(folder, RunningMesh(os.getpid(), options.is_encrypted, endpoints))
        except OSError as error:
            _log.warning("weft top and weft restart will not find this mesh by themselves: %s", error)
        return endpoints

    def summary(self) -> str:
        """After ``start``: how many graphs and models serve, and which do not, with the reason; some lines."""
        listed = {one for service in self._services.values() for one in service.models}
        graphs = sorted(one for one in listed if is_graph_folder(self._graphs / one.name))
        models = sorted({(one.name, one.version): one for one in sorted(listed - set(graphs))}.values())
        return "\n".join(filter(None, (told("graph", graphs), told("model", models)))) or "Nothing is loaded."

    async def watch(self) -> None:
        """Keep the services running; return when none is left, if restarts are off. Cancel it before ``stop``."""
        self._is_watched = True
        running = {asyncio.create_task(service.run()): service.name for service in self._services.values()}
        try:
            while running:
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    del running[task]
                    task.result()  # an error of this program must not go unseen
                rest = ", ".join(running.values())
                _log.warning("%s", f"still serving: {rest}" if rest else "no service is left")
        finally:
            self._is_watched = False
            for task in running:
                task.cancel()
            if self._restarting is not None:
                self._restarting.cancel()

    def restart(self) -> None:
        """Start replacing every service, one after another; ``watch`` must run. No effect during a restart."""
        if not self._is_watched:
            _log.warning("no restart before every service serves")
            return
        if self._restarting is not None and not self._restarting.done():
            _log.warning("a restart is in progress already")
            return
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        self._rolls = Rolls(self._rolls.number + 1, is_over=False)
        for service in sorted(self._services.values(), key=_place, reverse=True):
            self._note_roll()
            _log.info("%s is replaced", service.name)
            old_pid, start_s = service.processes[0].pid, asyncio.get_running_loop().time()
            try:
                roll = await service.replace()
            except MeshError as error:
                _log.error("%s", error)
                roll = Roll(service.name, old_pid, 0, asyncio.get_running_loop().time() - start_s, error=str(error))
            else:
                text = "%s was replaced: pid %d -> %d, %.1f s; lost: %s"
                _log.info(text, roll.service, roll.old_pid, roll.new_pid, roll.duration_s, roll.lost or "nothing")
            self._rolls.rolls.append(roll)
        self._rolls.is_over = True
        self._note_roll()
        _log.info("every service was told to restart")

    def _note_roll(self) -> None:
        try:
            publish_rolls(self._folder, self._rolls)
        except OSError as error:
            _log.warning("weft restart --wait will not see how it went: %s", error)

    @property
    def has_ended_well(self) -> bool:
        """After ``stop``: whether each service ran until then and exited with status 0."""
        return self._was_whole and all(process.exit_status == 0 for process in self._processes())

    def _processes(self) -> list[ServiceProcess]:
        return [process for service in self._services.values() for process in service.processes if process.is_started]

    async def stop(self) -> None:
        """Stop every process.

        The gateway stops first, then the router, so that requests in flight can finish; then the others. One that hangs
        uses up half of the remaining grace, so that the next ones have the other half. When the grace has passed, or
        this is cancelled, the rest is killed.
        """
        now, grace_s = asyncio.get_running_loop().time, self._options.grace_s
        deadline_s = now() + grace_s
        processes = self._processes()
        self._was_whole = all(service.is_running for service in self._services.values())
        try:
            for place in range(_BEHIND + 1):
                group = [process for process in processes if _place(process) == place]
                for process in group:
                    process.terminate()
                await _ended(group, deadline_s if place == _BEHIND else (now() + deadline_s) / 2)
        finally:
            for process in processes:
                if process.is_running:
                    _log.error("%s did not end in time and is killed", process.name)
                    process.kill()
            await _ended(processes, deadline_s + grace_s)
            self._held.close()

    def kill(self) -> None:
        """Kill every process, without a grace."""
        for process in self._processes():
            process.kill()

    def _listen(self, host: str, port: int, metrics_port: int, *, http: bool = False) -> list[str]:
        # A service drains its server, then its models, each within its grace; the router does so before the others.
        grace_s = self._options.grace_s / 4
        return [
            "--stop-with-stdin", "--share-ports", "--host", host, "--port" if http else "--grpc-port", str(port),
            "--metrics-port", str(metrics_port), "--grace-s", f"{grace_s:g}",
        ]  # fmt: skip

    def _repository_arguments(self, name: str, folder: Path) -> list[str]:
        own = self._options.service_arguments.get(name, ())  # may name the key of a mesh of several machines
        return [f"--mesh-key-file={self._mesh_key}", *own, "--repository", str(folder)]

    def _add_gateway(self, name: str, host: str, port: int, router: str, *more: str) -> None:
        options = self._options
        ports = self._listen(host, port, self._hold_metrics(host, name, name), http=True)
        # It answers no health checks, so it watches itself for hangs.
        watchdog = [f"--watchdog-abort-s={options.hang_timeout_s:g}"] if options.is_restarting else []
        arguments = [*watchdog, *more, *options.service_arguments.get(name, ()), "--router", router, *ports]
        self._add(name, arguments, module="weft.gateway", speaks_grpc=False)

    def _hold_metrics(self, host: str, service: str, label: str, index: int = 0) -> int:
        """The port for the metrics of a service that is always the same, or a free one where it is in use."""
        port = self._options.metrics_port + _METRICS[service] + index
        if not self._options.metrics_port or index >= _MAX_FIXED or port > _MAX_PORT:
            return self._hold(host)
        try:
            return self._hold(host, port)
        except MeshError:
            _log.warning("port %d on %s is in use: the metrics of %s have another", port, host, label)
            return self._hold(host)

    def _hold(self, host: str, port: int = 0) -> int:
        held: socket.socket = self._held.enter_context(hold_port(host, port))
        number: int = held.getsockname()[1]
        return number

    def _add(
        self,
        name: str,
        arguments: Iterable[str],
        *,
        module: str,
        can_hand_over: bool = True,
        speaks_grpc: bool = True,
        own_address: str = "",
        security: ChannelSecurity | None = None,
    ) -> None:
        # -P: a file in the current folder must not shadow a library.
        self._services[name] = SupervisedService(
            name,
            [sys.executable, "-P", "-m", module, *arguments],
            self._options,
            self._log,
            can_hand_over=can_hand_over,
            speaks_grpc=speaks_grpc,
            own_address=own_address,
            security=security,
        )

    async def _all_serving(self, names: Iterable[str], deadline_s: float) -> dict[str, Endpoint]:
        """Start services and return their endpoints, in order; one MeshError lists all failures."""
        names = list(names)
        results = await asyncio.gather(
            *(self._services[name].start(deadline_s) for name in names), return_exceptions=True
        )
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
            # A service that ended meanwhile may be the cause.
            others = [process for process in self._processes() if process.name not in names]
            failures += [process.describe_exit() for process in others if not process.is_running]
            cure = [] if ROUTER in names else ["If model files are missing, run `make models`."]
            raise MeshError("\n".join(failures + cure))
        return endpoints


def _place(service: SupervisedService | ServiceProcess) -> int:
    return _PLACES.get(service.name, _BEHIND)


def _labels(name: str, num_replicas: int) -> list[str]:
    return [name, *(f"{name}-{number}" for number in range(2, num_replicas + 1))]


def _metrics(labels: list[str], endpoints: Mapping[str, Endpoint]) -> Iterator[str]:
    for label in labels:
        url = f"http://{endpoints[label].metrics}/metrics"
        yield url if len(labels) == 1 else f"{label}={url}"


async def _ended(processes: Iterable[ServiceProcess], deadline_s: float) -> None:
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if waits:
        remaining_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        _, pending = await asyncio.wait(waits, timeout=remaining_s)
        for task in pending:
            task.cancel()
