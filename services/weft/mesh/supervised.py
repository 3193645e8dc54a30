"""``SupervisedService``: keeps one service running; restarts it when it dies or hangs, replaces it without a gap."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

from weft.base.processes.process import DEATH_WINDOW_S, Endpoint, RestartPolicy, ServiceProcess
from weft.mesh.preflight import MeshError
from weft.mesh.readiness import dialable, until_it_hangs, wait_ready
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

T = TypeVar("T")
#: A request to replace a service; done when it is replaced.
Replacement: TypeAlias = asyncio.Future[None]


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
        log: Receives (service name, line) for each line that it logs.
        report: Receives messages for the person who started it.
        can_hand_over: Whether two processes of it may run at once; if not, a replacement has a gap.
        policy: Decides about restarts.
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
        log: Callable[[str, str], None],
        report: Callable[[str], None],
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
        self._report = report
        self._can_hand_over = can_hand_over
        self._policy = policy or RestartPolicy()
        self._speaks_grpc = speaks_grpc
        self._own_address = own_address
        self._security = security
        self._process = self._made()
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
        lacks = await self._or_died(self._process, self._ready(endpoint, deadline_s))
        if lacks:
            self._report(f"{self.name} serves, but not all of it:{_indented(lacks)}")
        self._policy.serves()
        return endpoint

    async def run(self) -> None:
        """Keep a started service running; return when it has died and must not be restarted."""
        while True:
            self._report(await self._lost())
            if not self._supervision.is_restarting:
                break
            await self._start_again()
        self._is_given_up = True
        while not self._requests.empty():
            _refuse(self._requests.get_nowait(), MeshError(self._gone))

    async def replace(self) -> None:
        """Replace the process by a new one on the same address; return when the old one has finished its requests.

        ``run`` must be running; a pause before its next restart ends at once. Raises MeshError: the new process cannot
        serve, and the old one, if any, continues; or ``run`` has ended.
        """
        if self._is_given_up:
            raise MeshError(self._gone)
        request: Replacement = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        await request

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
                self._report(
                    f"{self.name} does not answer health checks; it is killed when it has not for {timeout_s:g} s"
                )
            else:
                self._report(f"{self.name} answers again")

        address = self._own_address or dialable(endpoint.grpc)
        await until_it_hangs(address, timeout_s, report, self._security, self._supervision.wire)

    async def _ready(self, endpoint: Endpoint, deadline_s: float) -> list[str]:
        if not self._speaks_grpc:
            return []
        address, wire = self._own_address or dialable(endpoint.grpc), self._supervision.wire
        return await wait_ready(self.name, address, deadline_s=deadline_s, security=self._security, wire=wire)

    async def _start_again(self) -> None:
        now = asyncio.get_running_loop().time
        died_s = now()
        while True:
            pause_s = self._policy.died()
            when = datetime.now(UTC).isoformat(timespec="seconds")
            if self._policy.is_hopeless:
                self._report(
                    f"{self.name} DIED {self._policy.num_deaths} TIMES within {DEATH_WINDOW_S:g} s; "
                    "see its last lines, mend it, or stop"
                )
            self._report(f"{when}: {self.name} is started again in {pause_s:.1f} s, attempt {self._policy.attempt}")
            request = await self._requested_within(pause_s)
            self._process = process = self._made()
            deadline_s = now() + self._supervision.start_timeout_s
            try:
                await process.start()
                endpoint = await self._announced(process, deadline_s)
            except (MeshError, OSError) as error:
                self._report(str(error))
                process.kill()
                _refuse(request, MeshError(f"{self.name} could not be started"))
                continue
            self._policy.serves()
            _finish(request)
            try:
                lacks = await self._or_died(process, self._ready(endpoint, deadline_s))
            except MeshError as error:
                if not process.is_running:
                    self._report(str(error))
                    continue
                self._report(f"{self.name} runs again, but not all of it: {error}")
                return
            rest = f", but not all of it:{_indented(lacks)}" if lacks else ""
            self._report(f"{self.name} serves again after {now() - died_s:.1f} s, pid {endpoint.pid}{rest}")
            return

    async def _requested_within(self, pause_s: float) -> Replacement | None:
        """Pause; a replacement request ends the pause and is returned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                return await self._requests.get()
        return None

    async def _replaced(self, request: Replacement) -> None:
        """Start another process; complete the request when the old one has ended. Raises MeshError."""
        old = self._process
        if not self._can_hand_over:
            await self._ended(old)
            new = self._made()
            try:
                await new.start()
            except OSError as error:  # ``_lost`` sees next that the old one has ended
                raise MeshError(f"{self.name} could not be started: {error}") from None
            self._process = new
            await self._announced(new, asyncio.get_running_loop().time() + self._supervision.start_timeout_s)
            self._policy.serves()
            _finish(request)
            return
        new = self._made("--take-over")
        self._others.add(new)
        try:
            await new.start()
            await self._announced(new, asyncio.get_running_loop().time() + self._supervision.start_timeout_s)
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
            await self._ended(old)
            self._others.discard(old)
            _finish(request)

        task = asyncio.create_task(retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _ended(self, process: ServiceProcess) -> None:
        process.terminate()
        try:
            async with asyncio.timeout(self._supervision.grace_s):
                await process.wait()
        except TimeoutError:
            self._report(f"{self.name}: the process before did not end in time and is killed")
            process.kill()
            await process.wait()

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


def _indented(lines: list[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _finish(request: Replacement | None) -> None:
    if request is not None and not request.done():
        request.set_result(None)


def _refuse(request: Replacement | None, error: MeshError) -> None:
    if request is not None and not request.done():
        request.set_exception(error)
