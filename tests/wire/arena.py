"""Where attacks take place: a service, a neighbour who calls it meanwhile, and what the attack costs the two."""

import contextlib
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.wire.echo_process import EchoService
from tests.wire.neighbour import Neighbour
from tests.wire.peer import Peer

#: Of the full sizes; ``make abuse`` has 1.
SCALE = float(os.environ.get("WEFT_ABUSE_SCALE", "0.05"))
MIB = 1 << 20
_FIGURES = ("num_tasks", "num_descriptors", "num_timers", "num_slow", "num_buffered_bytes")
#: Objects that a server keeps so many of, whoever calls: caches of header blocks, and deadlines that are past.
KEPT = {"DecodedHeaders": 200, "RequestHead": 200, "Method": 20, "Deadline": 1200}


class Attack(NamedTuple):
    """Something bad that clients do.

    Attributes:
        name: For the table.
        run: Does it, and says in words what the service did.
        max_mib: By how much resident memory may rise meanwhile, at full size.
        max_s: How long it may take, at full size.
        limits: Of the service; an attack without shares one service with others.
        arguments: Of the service.
    """

    name: str
    run: "Callable[[Arena], str]"
    max_mib: float = 16.0
    max_s: float = 60.0
    limits: Mapping[str, float] = {}
    arguments: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """What an attack did.

    Attributes:
        seen: What the service did, in words.
        took_s: How long the attack took; the service's CPU time meanwhile is ``cpu_s``.
        peak_mib: By how much the service's resident memory rose at most.
        num_calls: Of the neighbour meanwhile; ``worst_ms`` is the longest one, ``p99_ms`` the 99th percentile.
        num_lines: How many lines the service logged, for ``num_connections`` of the attack.
    """

    seen: str
    took_s: float
    cpu_s: float
    peak_mib: float
    num_calls: int
    worst_ms: float
    p99_ms: float
    num_connections: int
    num_lines: int


class Arena:
    """The service and its peers.

    Args:
        echo: The service.
        neighbour: Calls it; does not at the moment.
        tls: For peers with TLS.
    """

    def __init__(self, echo: EchoService, neighbour: Neighbour, tls: ssl.SSLContext | None = None) -> None:
        self.echo = echo
        self.is_ours = echo.wire == "weft"
        self.num_connections = 0
        self._neighbour = neighbour
        self._tls = tls
        self._peers = contextlib.ExitStack()

    def num(self, full: int, at_least: int = 1) -> int:
        """How many, at the scale of this run."""
        return max(int(full * SCALE), at_least)

    def peer(
        self,
        settings: Mapping[int, int] | None = None,
        *,
        to: str = "plain",
        greets: bool = True,
        window: int = 0,
        receive_buffer_bytes: int = 0,
        timeout_s: float = 10.0,
    ) -> Peer:
        """A new connection to the ``plain`` port, the ``unix`` socket or the ``tls`` port; closed after the attack."""
        address = {"plain": self.echo.address, "unix": self.echo.unix, "tls": self.echo.tls}[to]
        context = self._tls if to == "tls" else None
        peer = Peer.connect(
            address, ssl_context=context, timeout_s=timeout_s, receive_buffer_bytes=receive_buffer_bytes
        )
        self._peers.enter_context(peer)
        self.num_connections += 1
        return peer.handshake(settings, window=window) if greets else peer

    def close_peers(self) -> None:
        """All of them."""
        self._peers.close()

    def expect(self, is_so: object, what: object = "") -> None:
        """What our server must do; a server of others may do otherwise."""
        assert is_so or not self.is_ours, what

    def play(self, attack: Attack) -> Outcome:
        """Do it, and wait until nothing is left of it.

        Raises:
            AssertionError: The neighbour was not answered right; something is left; too much memory, time or log.
        """
        self.num_connections = 0
        before = self.echo.stats(b"collect")
        num_lines = len(self._log_lines())
        Path(f"/proc/{self.echo.pid}/clear_refs").write_text("5")
        self._neighbour.go()
        begin_s, cpu_s = time.monotonic(), _cpu_s(self.echo.pid)
        try:
            seen = attack.run(self)
            took_s, cpu_s = time.monotonic() - begin_s, _cpu_s(self.echo.pid) - cpu_s
            peak_mib = (_peak_bytes(self.echo.pid) - before["rss_bytes"]) / MIB
        finally:
            self.close_peers()
            report = self._neighbour.pause()
        outcome = Outcome(
            seen, took_s, cpu_s, peak_mib, report.num_calls, report.worst_ms, report.p99_ms,
            self.num_connections, len(self._log_lines()) - num_lines,
        )  # fmt: skip
        assert report.num_calls == report.num_right, report
        self.expect(outcome.num_lines <= self.num_connections, self._log_lines()[num_lines:][:20])
        self.expect(peak_mib <= attack.max_mib, outcome)
        self.expect(took_s <= attack.max_s, outcome)
        self._wait_nothing_left(before)
        return outcome

    def _log_lines(self) -> list[str]:
        """What it has logged; what follows in a traceback does not count."""
        return [line for line in self.echo.log_lines() if line.startswith(("INFO ", "WARNING ", "ERROR "))]

    def _wait_nothing_left(self, before: dict[str, Any], timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while more := left(before, self.echo.stats(b"collect")):
            assert time.monotonic() < deadline_s or not self.is_ours, more
            if not self.is_ours:
                return
            time.sleep(0.05)


def left(before: dict[str, Any], found: dict[str, Any]) -> dict[str, int]:
    """What there is more of than before: tasks, descriptors, calls, objects of connections and streams."""
    more = {name: found[name] - before[name] for name in _FIGURES}
    alive = {name: number - before["alive"].get(name, 0) for name, number in found["alive"].items()}
    return {name: number for name, number in (more | alive).items() if number > KEPT.get(name.rpartition(".")[2], 0)}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


@contextlib.contextmanager
def arena(echo: EchoService, tls: ssl.SSLContext | None = None) -> Iterator[Arena]:
    """An arena with a neighbour of its own; peers that are left are closed."""
    with Neighbour(echo.any_address) as neighbour:
        neighbour.go()
        neighbour.pause()
        made = Arena(echo, neighbour, tls)
        try:
            yield made
        finally:
            made.close_peers()
