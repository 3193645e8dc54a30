"""What is done to the mesh, and what may come of it."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from tests.certificates import Authority
from tests.faults.load import Record
from tests.faults.mesh import Mesh, RunningLoad, wait_serving
from tests.faults.relay import Mode

#: It is so inside the block; at the end everything is as it was.
Injection = Callable[[Mesh], AbstractContextManager[None]]

_HERE = Path(__file__).parent


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        name: For people.
        inject: Does it.
        allowed: Statuses, beside OK, that a client may see meanwhile; with none, no request may fail.
        recover_s: How long after the end of the block a request may still fail, seconds.
        is_quick: It is part of every test run, not only of `make faults`.
    """

    name: str
    inject: Injection
    allowed: frozenset[str] = frozenset()
    recover_s: float = 0.0
    is_quick: bool = False


class Outcome(NamedTuple):
    """What the clients saw.

    Attributes:
        num_sent, num_right, num_refused: Requests; those answered rightly; those that got an allowed error.
        num_wrong: Wrong answers, and errors that are not allowed.
        num_lost: Neither answer nor error.
        num_twice: More than one answer.
        statuses: How many ended with each status.
        disturbed_s: From the begin of the fault to the last request that failed, 0 if none did.
        recover_s: From its end to the last request that failed, 0 if none did later.
    """

    num_sent: int
    num_right: int
    num_refused: int
    num_wrong: int
    num_lost: int
    num_twice: int
    statuses: dict[str, int]
    disturbed_s: float
    recover_s: float


def play(mesh: Mesh, fault: Fault, *, hold_s: float, after_s: float) -> Outcome:
    """The outcome of one fault under load.

    Args:
        mesh: Serves; and serves again at the end.
        fault: What is done.
        hold_s: How long the fault stays, beyond what injecting it takes.
        after_s: How long the load goes on afterwards.
    """
    with contextlib.closing(RunningLoad(mesh.router.address)) as load:
        time.sleep(min(hold_s, 1.0) / 2)
        begin_s = time.monotonic()
        with fault.inject(mesh):
            time.sleep(hold_s)
        end_s = time.monotonic()
        time.sleep(after_s)
        records = load.finish()
    return judge(records, fault.allowed, begin_s, end_s)


def judge(records: list[Record], allowed: frozenset[str], begin_s: float, end_s: float) -> Outcome:
    """What the records amount to; times on the clock of ``time.monotonic``."""
    statuses = Counter(record.status for record in records)
    last_failed_s = max((record.due_s for record in records if record.status != "OK"), default=begin_s)
    return Outcome(
        num_sent=len(records),
        num_right=statuses["OK"],
        num_refused=sum(statuses[status] for status in allowed),
        num_wrong=sum(statuses[status] for status in statuses.keys() - {"OK", "LOST"} - allowed),
        num_lost=statuses["LOST"],
        num_twice=sum(record.num_answers > 1 for record in records),
        statuses=dict(statuses),
        disturbed_s=last_failed_s - begin_s,
        recover_s=max(last_failed_s - end_s, 0.0),
    )


@contextlib.contextmanager
def killed_replica(mesh: Mesh) -> Iterator[None]:
    mesh.models[0].end(signal.SIGKILL)
    yield
    mesh.models[0].start()
    wait_serving(mesh.models[0].address)


@contextlib.contextmanager
def rolling_restart(mesh: Mesh) -> Iterator[None]:
    for model in mesh.models:
        model.restart()
    yield


@contextlib.contextmanager
def stopped_replica(mesh: Mesh) -> Iterator[None]:
    mesh.models[0].send(signal.SIGSTOP)
    yield
    mesh.models[0].send(signal.SIGCONT)


def relayed(mode: Mode, *, num_replicas: int = 1, delay_s: float = 0.0) -> Injection:
    @contextlib.contextmanager
    def inject(mesh: Mesh) -> Iterator[None]:
        relays = mesh.relays[:num_replicas]
        for relay in relays:
            relay.set_mode(mode, delay_s=delay_s)
        yield
        for relay in relays:
            relay.set_mode("pass")

    return inject


@contextlib.contextmanager
def lying_replica(mesh: Mesh) -> Iterator[None]:
    mesh.models[0].restart(program=_HERE / "lying_service.py")
    yield
    mesh.models[0].restart()


@contextlib.contextmanager
def no_room_for_logs(mesh: Mesh) -> Iterator[None]:
    for model in mesh.models:
        model.restart(log=Path("/dev/full"))
    yield
    for model in mesh.models:
        model.restart()


@contextlib.contextmanager
def jumping_clocks(mesh: Mesh) -> Iterator[None]:
    for model in mesh.models:
        model.restart(program=_HERE / "jumping_clock.py")
    for model in mesh.models:
        model.send(signal.SIGUSR2)
    yield
    for model in mesh.models:
        model.restart()


def replaced(kind: str, number: signal.Signals) -> Injection:
    @contextlib.contextmanager
    def inject(mesh: Mesh) -> Iterator[None]:
        getattr(mesh, kind).restart(number)
        yield

    return inject


def expired(authority: Authority, *names: str) -> Injection:
    """The certificates of some replicas are those that ran out a minute ago, and the connections are made anew."""

    @contextlib.contextmanager
    def inject(mesh: Mesh) -> Iterator[None]:
        for name in names:
            authority.issue(name, valid_s=-60)
        for relay in mesh.relays[: len(names)]:
            relay.set_mode("reset")
            relay.set_mode("pass")
        yield
        for name in names:
            authority.issue(name)

    return inject


LATE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})

FAULTS = (
    Fault("kill -9 of one of two replicas", killed_replica, is_quick=True),
    Fault("SIGTERM of each replica in turn", rolling_restart),
    Fault("SIGSTOP of one of two replicas", stopped_replica, is_quick=True),
    Fault("one replica answers 0.5 s late", relayed("pass", delay_s=0.5)),
    Fault("one replica's link is dead, its connections open", relayed("hold"), is_quick=True),
    Fault("one replica's connections are reset", relayed("reset")),
    Fault("one replica answers noise", relayed("garble"), is_quick=True),
    Fault("one replica answers wrong shapes", lying_replica, frozenset({"INTERNAL"}), is_quick=True),
    Fault("no room for the replicas' logs", no_room_for_logs),
    Fault("the replicas' clocks jump an hour back", jumping_clocks),
    Fault("both replicas are cut off", relayed("hold", num_replicas=2), LATE, recover_s=3.0, is_quick=True),
    Fault("kill -9 and restart of the only preprocess", replaced("preprocess", signal.SIGKILL), LATE, recover_s=3.0),
    Fault("SIGTERM and restart of the only postprocess", replaced("postprocess", signal.SIGTERM), LATE, recover_s=3.0),
    Fault("kill -9 and restart of the router", replaced("router", signal.SIGKILL), LATE, recover_s=3.0),
)
