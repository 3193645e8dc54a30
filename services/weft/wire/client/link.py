"""The one connection of a channel: opened on demand, reopened with backoff; calls wait for it in order."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from weft.wire.client.call import ClientCall
from weft.wire.client.dialling import DialError, Dialler
from weft.wire.client.protocol import ChannelOptions, ClientProtocol, RequestHeads
from weft.wire.connection.streams import StreamStates
from weft.wire.event_loop import DeadlineQueue
from weft.wire.frames import ErrorCode
from weft.wire.interface import ChannelConnectivity, StatusCode
from weft.wire.transport import Heartbeat


class Connectivity:
    """A state that can be waited for."""

    def __init__(self) -> None:
        self.state = ChannelConnectivity.IDLE
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self, state: ChannelConnectivity) -> None:
        """Enter a state; SHUTDOWN is the last one."""
        if state is self.state or self.state is ChannelConnectivity.SHUTDOWN:
            return
        self.state = state
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self, last: ChannelConnectivity) -> None:
        """Return once the state is another than ``last``."""
        while self.state is last:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


#: A connection that ends sooner counts as a failed attempt, if the one before it did too, in seconds.
_SHORT_LIFE_S = 1.0


class Backoff:
    """Exponential backoff between attempts to connect; ``random`` gives numbers uniform from 0 to 1."""

    def __init__(self, options: ChannelOptions, random: Callable[[], float]) -> None:
        self._options = options
        self._random = random
        self._num_failures = 0
        self._num_short_lives = 0
        self._begun_s = float("-inf")
        self._ready_s = float("-inf")

    def begin(self, now_s: float) -> None:
        """An attempt begins."""
        self._begun_s = now_s

    def succeed(self, now_s: float) -> None:
        """The attempt has given a connection."""
        self._num_failures = 0
        self._ready_s = now_s

    def fail(self, now_s: float) -> float:
        """The attempt has failed; returns the delay before the next one, counted from the start of this one."""
        delay_s = self._delay_s(self._num_failures)
        self._num_failures += 1
        return max(0.0, self._begun_s + delay_s - now_s)

    def lose(self, now_s: float, *, has_served: bool = False) -> float:
        """The connection has ended; returns the delay before the next attempt.

        The delay is 0 unless connections repeatedly end right after they are made, without having served a call.
        """
        if has_served or now_s - self._ready_s >= _SHORT_LIFE_S:
            self._num_short_lives = 0
            return 0.0
        self._num_short_lives += 1
        if self._num_short_lives == 1:
            return 0.0
        return max(0.0, self._begun_s + self._delay_s(self._num_short_lives - 2) - now_s)

    def _delay_s(self, num_failures: int) -> float:
        options = self._options
        base_s = options.initial_backoff_s * options.backoff_factor ** min(num_failures, 64)
        jitter = 1.0 + options.backoff_jitter * (2.0 * self._random() - 1.0)
        return min(base_s, options.max_backoff_s) * jitter


_log = logging.getLogger("weft.wire.client")

#: Largest growth of the keepalive time after servers complained.
_MAX_KEEPALIVE_FACTOR = 1 << 10
#: How long a closing connection may write its last bytes and wait for the server's end of TLS, in seconds: servers of
#: gRPC do not send it.
_CLOSE_S = 0.1
#: Pause after a call that was refused, in seconds.
_HOLD_S = 0.01


class Link:
    """Connects calls to the server; ``direct`` is the connection for calls that need not wait for others."""

    loop: asyncio.AbstractEventLoop
    deadlines: DeadlineQueue
    _heartbeat: Heartbeat

    def __init__(
        self,
        dialler: Dialler,
        heads: RequestHeads,
        options: ChannelOptions,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.options = options
        self.heads = heads
        self.connectivity = Connectivity()
        self.is_closed = False
        self.direct: StreamStates | None = None
        self._dialler = dialler
        self._backoff = Backoff(options, random)
        self._protocol: ClientProtocol | None = None
        self._leaving: set[ClientProtocol] = set()
        self._waiting: dict[ClientCall, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None
        self._last_error = ""
        self._keepalive_factor = 1
        self._is_attached = False
        self._idle: asyncio.Future[None] | None = None
        self._is_over: asyncio.Future[None] | None = None

    # Calls.

    def begin(self, call: ClientCall) -> None:
        """Send a call, or queue it until a connection accepts it."""
        protocol = self._protocol
        if protocol is not None and not self._waiting and self._held is None and protocol.connection.can_open_stream:
            call.start(protocol.connection)
            return
        if self.is_closed and protocol is None:
            call.fail(StatusCode.UNAVAILABLE, "the channel was closed")
            return
        self._waiting[call] = None
        self.direct = None
        call.has_waited = True
        if protocol is not None and (protocol.connection.is_closed or not protocol.connection.has_stream_ids):
            self._retire(protocol)
        if self._protocol is None:
            if self.connectivity.state is ChannelConnectivity.IDLE:
                self.connect()
            elif self.connectivity.state is ChannelConnectivity.TRANSIENT_FAILURE and not call.waits_for_ready:
                call.fail(StatusCode.UNAVAILABLE, self._last_error)

    def attach(self) -> None:
        """Use the running event loop from now on."""
        if not self._is_attached:
            self.loop = asyncio.get_running_loop()
            self.deadlines = DeadlineQueue(self.loop)
            self._heartbeat = Heartbeat(self.loop)
            self._is_attached = True

    def forget(self, call: ClientCall) -> None:
        """Remove a queued call that has ended."""
        self._waiting.pop(call, None)
        if not self._waiting:
            self._pump()
        self._tell_if_idle()

    def hold(self) -> None:
        """Pause new calls briefly: the server refused some below its limit, as C core does while it frees others."""
        self.direct = None
        if self._held is None:
            self._held = self.loop.call_later(_HOLD_S, self._release)

    def _release(self) -> None:
        self._held = None
        self._pump()

    def _pump(self) -> None:
        if self._held is not None:
            return
        waiting, protocol = self._waiting, self._protocol
        while waiting and protocol is not None and protocol.connection.can_open_stream:
            call = next(iter(waiting))
            del waiting[call]
            call.start(protocol.connection)
        if not waiting and protocol is not None and not self.is_closed:
            self.direct = protocol.connection

    # Connecting.

    def connect(self) -> None:
        """Connect, unless there is a connection or an attempt; during a backoff, when that ends."""
        if self.connectivity.state is ChannelConnectivity.IDLE and self._task is None:
            self.attach()
            self.connectivity.set(ChannelConnectivity.CONNECTING)
            self._task = self.loop.create_task(self._dial())

    async def _dial(self) -> None:
        self._backoff.begin(self.loop.time())
        limits, liveness = self.options, self.options.liveness(self._keepalive_factor)
        try:
            protocol = await self._dialler.dial(lambda: ClientProtocol(self.loop, limits, liveness, self))
        except DialError as error:
            self._task = None
            self._fail(str(error))
            return
        except Exception as error:
            _log.exception("an attempt to connect has failed in a way that is not foreseen")
            self._task = None
            self._fail(f"failed to connect to all addresses; last error: {error!r}")
            return
        self._task = None
        self._protocol = protocol
        self._backoff.succeed(self.loop.time())
        if not protocol.is_lost:
            self._heartbeat.add(protocol)
        self.connectivity.set(ChannelConnectivity.READY)
        if protocol.connection.is_peer_leaving:
            self._retire(protocol)
        self._pump()

    def _fail(self, error: str) -> None:
        self._last_error = error
        self._back_off(self._backoff.fail(self.loop.time()))
        self._fail_waiting(error)

    def _fail_waiting(self, error: str, *, also_patient: bool = False) -> None:
        for call in [call for call in self._waiting if also_patient or not call.waits_for_ready]:
            call.fail(StatusCode.UNAVAILABLE, error)

    def _back_off(self, delay_s: float) -> None:
        self.connectivity.set(ChannelConnectivity.TRANSIENT_FAILURE)
        self._timer = self.loop.call_later(delay_s, self._end_backoff)

    def _end_backoff(self) -> None:
        self._timer = None
        self._rest()

    def _rest(self) -> None:
        """Dial if calls wait: there is no connection, and no reason not to connect."""
        self.connectivity.set(ChannelConnectivity.IDLE)
        if self._waiting and not self.is_closed:
            self.connect()

    # Events of connections.

    def on_stream_closed(self, protocol: ClientProtocol) -> None:
        """A call has ended: send the next one that waits."""
        if self._waiting:
            self._pump()
        if self._leaving or self.is_closed:
            if protocol in self._leaving and not protocol.connection.streams:
                self.loop.call_soon(self._close_if_unused, protocol)
            self._tell_if_idle()

    def on_settings(self, protocol: ClientProtocol) -> None:
        """The server changed how many concurrent calls it allows."""
        self._pump()

    def on_leaving(self, protocol: ClientProtocol, code: int, debug: bytes) -> None:
        """The server sent GOAWAY: new calls use a new connection."""
        if code == ErrorCode.ENHANCE_YOUR_CALM and debug == b"too_many_pings":
            self._keepalive_factor = min(self._keepalive_factor * 2, _MAX_KEEPALIVE_FACTOR)
        self._retire(protocol)

    def on_protocol_lost(self, protocol: ClientProtocol) -> None:
        """The connection is over."""
        if self._is_attached:
            self._heartbeat.discard(protocol)
        self._leaving.discard(protocol)
        self._drop(protocol)
        if self._is_over is not None and not self._leaving and not self._is_over.done():
            self._is_over.set_result(None)

    def _retire(self, protocol: ClientProtocol) -> None:
        if protocol is self._protocol:
            if not protocol.is_lost:
                self._leaving.add(protocol)
            self.loop.call_soon(self._close_if_unused, protocol)
            self._drop(protocol)

    def _close_if_unused(self, protocol: ClientProtocol) -> None:
        if not protocol.connection.streams and not protocol.is_lost:
            protocol.close()

    def _drop(self, protocol: ClientProtocol) -> None:
        if protocol is not self._protocol:
            return
        self._protocol = self.direct = None
        if self.is_closed:
            self._fail_waiting("the channel was closed", also_patient=True)
            return
        delay_s = self._backoff.lose(self.loop.time(), has_served=protocol.has_served)
        if delay_s:
            self._last_error = f"failed to connect to all addresses; last error: {protocol.reason or 'GOAWAY'}"
            self._back_off(delay_s)
        else:
            self._rest()

    # Closing.

    async def close(self, grace_s: float | None) -> None:
        """End all calls, those in flight after ``grace_s`` seconds, and close all connections."""
        self.is_closed = True
        self.direct = None
        self.connectivity.set(ChannelConnectivity.SHUTDOWN)
        if not self._is_attached:
            return
        for timer in (self._timer, self._held):
            if timer is not None:
                timer.cancel()
        self._held = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        try:
            if self._protocol is None:
                self._cancel(list(self._waiting))
            if grace_s and self._calls():
                await self._wait_idle(grace_s)
        finally:
            self._cancel(self._calls())
            if self._protocol is not None:
                self._leaving.add(self._protocol)
                self._protocol = None
            for protocol in list(self._leaving):
                protocol.close()
            self.deadlines.close()
        if task is not None:
            await asyncio.wait([task])
        if self._leaving:
            if self._is_over is None:
                self._is_over = self.loop.create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.shield(self._is_over)
            for protocol in list(self._leaving):
                protocol.abort("the channel was closed")
            await asyncio.shield(self._is_over)

    def _cancel(self, calls: list[ClientCall]) -> None:
        for call in calls:
            call.cancel()

    async def _wait_idle(self, grace_s: float) -> None:
        self._idle = self.loop.create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle

    def _protocols(self) -> list[ClientProtocol]:
        return [*self._leaving, *([self._protocol] if self._protocol is not None else [])]

    def _calls(self) -> list[ClientCall]:
        on_streams = [stream for protocol in self._protocols() for stream in protocol.connection.streams.values()]
        return [*self._waiting, *(call for call in on_streams if isinstance(call, ClientCall))]

    def _tell_if_idle(self) -> None:
        if self._idle is not None and not self._idle.done() and not self._calls():
            self._idle.set_result(None)
