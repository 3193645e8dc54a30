"""``SupervisedService``: keeps one service running; restarts it when it dies or hangs, replaces it without a gap."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from weft.base.observing.logs import get_logger
from weft.base.processes.process import DEATH_WINDOW_S, Endpoint, RestartPolicy, ServiceProcess
from weft.mesh.preflight import MeshError
from weft.mesh.readiness import ModelState, dialable, told, until_it_hangs, wait_ready
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

T = TypeVar("T")


class Roll(NamedTuple):
    """How a service was replaced; a process id of 0 is that of a process that does not run.

    Attributes:
        duration_s: From the request until the old process had ended.
        lost: What clients lost; "" for nothing.
        error: Why it was not replaced; "" if it was.
    """

    service: str
    old_pid: int
    new_pid: int
    duration_s: float
    lost: str = ""
    error: str = ""


#: A request to replace a service; done when it is replaced.
Replacement: TypeAlias = asyncio.Future[Roll]

_log = get_logger("weft.mesh")


@dataclass(frozen=True, slots=True)
class Supervision:
    """Settings for keeping a service running.

    Attributes:
        start_timeout_s: Longest start, seconds.
        grace_s: Time for a replaced process to finish its requests, seconds.
        is_restarting: Whether a service that dies is restarted.
        hang_timeout_s: Kill a service that answers no health check for this many seconds; 0: never.
        wire: Implementation of gRPC for these; None: ``default_wire``.
    """

    start_timeout_s: float = 180.0
    grace_s: float = 20.0
    is_restarting: bool = True
    hang_timeout_s: float = 30.0
    wire: WireName | None = None


class SupervisedService:
    """A service on a fixed address: one process or none, and two during a hand-over.

    Args:
        command: Program and arguments, also of each restart, so it names fixed ports.
        log: Receives (service name, process id, line) for each line that it logs.
        can_hand_over: Whether two processes of it may run at once; if not, a replacement has a gap.
        speaks_grpc: Whether it answers health checks. If not, it is ready when it announces its address, and must end
            by itself when it hangs.
        own_address: Where the mesh itself calls it; "": at the address that it announces.
        security: Of these calls; None: plaintext without a key.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        supervision: Supervision,
        log: Callable[[str, int, str], None],
        *,
        can_hand_over: bool = True,
        policy: RestartPolicy | None = None,
        speaks_grpc: bool = True,
        own_address: str = "",
        security: ChannelSecurity | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._supervision = supervision
        self._log = log
        self._can_hand_over = can_hand_over
        self._policy = policy or RestartPolicy()
        self._speaks_grpc = speaks_grpc
        self._own_address = own_address
        self._security = security
        self._process = self._made()
        #: What it listed when it was ready first.
        self.models: list[ModelState] = []
        self._others: set[ServiceProcess] = set()  # a successor that does not serve yet, predecessors that drain
        self._retiring: set[asyncio.Task[None]] = set()
        self._requests: asyncio.Queue[Replacement] = asyncio.Queue()
        self._is_given_up = False
        self._gone = f"{name} does not run, and is not started again; it was not replaced"

    @property
    def processes(self) -> list[ServiceProcess]:
        """The serving process and, during a replacement, the other one."""
        return [self._process, *self._others]

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process.is_running

    async def start(self, deadline_s: float) -> Endpoint:
        """Start the service and wait until it is SERVING.

        Raises MeshError: it exited, or is not ready at ``deadline_s``, on the clock of the running loop.
        """
        await self._process.start()
        endpoint = await self._announced(self._process, deadline_s)
        self.models = await self._or_died(self._process, self._ready(endpoint, deadline_s))
        self._policy.serves()
        return endpoint

    async def run(self) -> None:
        """Keep a started service running; return when it has died and must not be restarted."""
        while True:
            _log.error("%s", await self._lost())
            if not self._supervision.is_restarting:
                break
            await self._start_again()
        self._is_given_up = True
        while not self._requests.empty():
            _refuse(self._requests.get_nowait(), MeshError(self._gone))

    async def replace(self) -> Roll:
        """Replace the process by a new one on the same address; return how, when the old one has finished its requests.

        ``run`` must be running; a pause before its next restart ends at once. Raises MeshError: the new process cannot
        serve, and the old one, if any, continues; or ``run`` has ended.
        """
        if self._is_given_up:
            raise MeshError(self._gone)
        request: Replacement = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await request

    def _made(self, *more: str) -> ServiceProcess:
        return ServiceProcess(self.name, [*self._command, *more], self._log)

    async def _lost(self) -> str:
        """Wait until the process has ended, replacing it on request meanwhile; returns how it ended."""
        while True:
            process = self._process
            ended = asyncio.create_task(process.wait())
            hangs = asyncio.create_task(self._hangs(process))
            requested = asyncio.create_task(self._requests.get())
            try:
                await asyncio.wait((ended, hangs, requested), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (ended, hangs, requested):
                    task.cancel()
            if requested.done() and (ended.done() or hangs.done()):
                self._requests.put_nowait(requested.result())  # for the start that follows
            if ended.done():
                return process.describe_exit()
            if hangs.done():
                hangs.result()  # an error of the check itself is no hang
                process.kill()
                await process.wait()
                return f"{self.name} has not answered for {self._supervision.hang_timeout_s:g} s and was killed"
            request = requested.result()
            try:
                await self._replaced(request)
            except MeshError as error:
                _refuse(request, error)

    async def _hangs(self, process: ServiceProcess) -> None:
        """Return when the process hangs and must be killed; without a limit, never."""
        timeout_s = self._supervision.hang_timeout_s
        if not (timeout_s and self._supervision.is_restarting and self._speaks_grpc):
            await asyncio.Event().wait()
        endpoint = await process.endpoint()

        def report(verdict: str) -> None:
            if verdict == "silent":
                text = "%s does not answer health checks; it is killed when it has not for %g s"
                _log.warning(text, self.name, timeout_s)
            else:
                _log.info("%s answers again", self.name)

        address = self._own_address or dialable(endpoint.grpc)
        await until_it_hangs(address, timeout_s, report, self._security, self._supervision.wire)

    async def _ready(self, endpoint: Endpoint, deadline_s: float) -> list[ModelState]:
        if not self._speaks_grpc:
            return []
        address, wire = self._own_address or dialable(endpoint.grpc), self._supervision.wire
        return await wait_ready(self.name, address, deadline_s=deadline_s, security=self._security, wire=wire)

    async def _start_again(self) -> None:
        now = asyncio.get_running_loop().time
        died_s = now()
        old = self._process
        while True:
            pause_s = self._policy.died()
            if self._policy.is_hopeless:
                text = "%s DIED %d TIMES within %g s; see its log above, mend it, or stop"
                _log.critical(text, self.name, self._policy.num_deaths, DEATH_WINDOW_S)
            _log.warning("%s is started again in %.1f s, attempt %d", self.name, pause_s, self._policy.attempt)
            request = await self._requested_within(pause_s)
            self._process = process = self._made()
            deadline_s = now() + self._supervision.start_timeout_s
            try:
                await process.start()
                endpoint = await self._announced(process, deadline_s)
            except (MeshError, OSError) as error:
                _log.error("%s", error)
                process.kill()
                _refuse(request, MeshError(f"{self.name} could not be started"))
                continue
            self._policy.serves()
            _finish(request, Roll(self.name, old.pid, process.pid, now() - died_s, "what it worked on when it died"))
            try:
                models = await self._or_died(process, self._ready(endpoint, deadline_s))
            except MeshError as error:
                _log.error("%s", error)
                if not process.is_running:
                    continue
                return
            rest = told("model", models)
            text = "%s serves again after %.1f s, pid %d%s"
            _log.info(text, self.name, now() - died_s, endpoint.pid, f": {rest}" if rest else "")
            return

    async def _requested_within(self, pause_s: float) -> Replacement | None:
        """Pause; a replacement request ends the pause and is returned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                return await self._requests.get()
        return None

    async def _replaced(self, request: Replacement) -> None:
        """Start another process; complete the request when the old one has ended. Raises MeshError."""
        old, now = self._process, asyncio.get_running_loop().time
        start_s = now()

        def roll(lost: str) -> Roll:
            return Roll(self.name, old.pid, self._process.pid, now() - start_s, lost)

        if not self._can_hand_over:
            lost = await self._ended(old)
            end_s = now()
            new = self._made()
            try:
                await new.start()
            except OSError as error:  # ``_lost`` sees next that the old one has ended
                raise MeshError(f"{self.name} could not be started: {error}") from None
            self._process = new
            await self._announced(new, now() + self._supervision.start_timeout_s)
            self._policy.serves()
            gap = f"calls of {now() - end_s:.1f} s, when no process served"
            _finish(request, roll(f"{lost}; {gap}" if lost else gap))
            return
        new = self._made("--take-over")
        self._others.add(new)
        try:
            await new.start()
            await self._announced(new, now() + self._supervision.start_timeout_s)
        except (MeshError, OSError) as error:
            new.kill()
            if new.is_started:
                await new.wait()
            self._others.discard(new)
            raise MeshError(f"{error}\n{self.name} was not replaced; the process before goes on serving") from None
        self._others.discard(new)
        self._others.add(old)
        self._process = new
        self._policy.serves()

        async def retire() -> None:
            lost = await self._ended(old)
            self._others.discard(old)
            _finish(request, roll(lost))

        task = asyncio.create_task(retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _ended(self, process: ServiceProcess) -> str:
        """End the process; return what its clients lost, "" for nothing."""
        process.terminate()
        try:
            async with asyncio.timeout(self._supervision.grace_s):
                await process.wait()
        except TimeoutError:
            _log.warning("%s: the process before did not end in time and is killed", self.name)
            process.kill()
            await process.wait()
            return f"what it worked on after {self._supervision.grace_s:g} s, when it was killed"
        return process.lost or (f"maybe more: {process.describe_exit()}" if process.exit_status else "")

    async def _announced(self, process: ServiceProcess, deadline_s: float) -> Endpoint:
        """Wait until the process announces its addresses. Raises MeshError if it ends first or is too slow."""
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._or_died(process, process.endpoint())
        except TimeoutError:
            raise MeshError(
                f"{self.name} is still loading after {self._supervision.start_timeout_s:g} s; its log is above; "
                "give it longer with --start-timeout-s"
            ) from None

    async def _or_died(self, process: ServiceProcess, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises MeshError if the process ends first."""
        task, died = asyncio.create_task(work), asyncio.create_task(process.wait())
        try:
            await asyncio.wait((task, died), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise MeshError(process.describe_exit())
        finally:
            task.cancel()
            died.cancel()


def _finish(request: Replacement | None, roll: Roll) -> None:
    if request is not None and not request.done():
        request.set_result(roll)


def _refuse(request: Replacement | None, error: MeshError) -> None:
    if request is not None and not request.done():
        request.set_exception(error)
