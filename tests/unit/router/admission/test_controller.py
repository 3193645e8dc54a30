"""Requests at the admission controller of a router: admitted, queued, refused."""

import asyncio
import logging
import random
import time
from typing import Any

import pytest

from weft.base.adaptive_limit import Outcome
from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.router.admission.controller import (
    MAX_LIMITS,
    AdmissionController,
    AdmissionSettings,
    Permit,
    admissible_priority,
    outcome_of,
)

S = 1_000_000_000


class Clock:
    """Time that only the test moves."""

    now_ns = S

    def __call__(self) -> int:
        """Now."""
        return self.now_ns


def make_controller(clock: Clock | None = None, **settings: Any) -> AdmissionController:
    """A controller with these settings."""
    return AdmissionController(AdmissionSettings(**settings), generator=random.Random(1), clock_ns=clock or Clock())


def enter(admission: AdmissionController, level: int = 2, client: str = "", *, left_s: float = 0.0) -> Permit:
    """A request for graph g comes now."""
    deadline_ns = S + int(left_s * S) if left_s else None
    return admission.admit(
        admission.limit("graph", "g"), level, client, CallContext(arrival_ns=S, deadline_ns=deadline_ns)
    )


def test_workers_divide_the_limits() -> None:
    """Of two workers each has half of 3, rounded up: of the router, of a graph, of a client; refusals say so."""
    context = CallContext(arrival_ns=S)
    for settings, policy, text in (
        ({"max_inflight": 3}, 0, "--max-inflight, divided among 2 workers, allows 2"),
        ({}, 3, "'max_inflight' of the graph's policy, divided among 2 workers, allows 2"),
        ({"max_inflight_per_client": 3}, 0, "as many as --max-inflight-per-client, divided among 2 workers, allows"),
    ):
        admission = AdmissionController(AdmissionSettings(**settings), num_workers=2, clock_ns=Clock())  # type: ignore[arg-type]
        limit = admission.limit("graph", "g", policy)
        for _ in range(2):
            admission.admit(limit, 2, "a", context)
        with pytest.raises(ResourceExhaustedError, match=text):
            admission.admit(limit, 2, "a", context)
        assert limit is admission.limit("graph", "g", policy)


def test_the_router_the_graph_and_the_client_are_limited() -> None:
    """Each refusal names its limit, has a hint, is counted at the graph, and nothing was begun for it."""
    for settings, policy, reason, text in (
        (
            {"max_inflight": 2},
            0,
            "limit",
            "the router has 2 requests in flight, and --max-inflight allows 2; try again",
        ),
        ({}, 2, "limit", "graph 'g' has 2 requests in flight, and 'max_inflight' of the graph's policy allows 2; try"),
        ({"max_inflight_per_client": 2}, 0, "client_limit", "the client has 2 requests in flight, as many as --max-in"),
    ):
        admission = make_controller(**settings)  # type: ignore[arg-type]
        limit = admission.limit("graph", "g", policy)
        context = CallContext(arrival_ns=S)
        for _ in range(2):
            admission.admit(limit, 2, "a", context)
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.admit(limit, 2, "a", context)
        assert text in caught.value.message
        assert caught.value.retry_after_ms
        assert caught.value.is_refused
        assert {(reason, 2): 1} == limit.refusals
        assert (2, 2) == (limit.num_inflight, admission.router.num_inflight)


@pytest.mark.parametrize(("priority", "level"), [(None, 2), (0, 2), (1, 1), (99, 6), ("1", 2), (True, 2), (-1, 2)])
def test_the_level_is_the_priority_of_the_request(priority: Any, level: int) -> None:
    """Without one, or with what is none, it is the default; there is a lowest."""
    parameters = {} if priority is None else {"priority": priority}
    assert level == make_controller().level_of(admissible_priority(parameters))


def test_the_client_is_who_authenticated_else_the_header() -> None:
    """Without the setting a header means nothing."""
    named = CallContext(headers={"x-client-id": "h"}, client_key="key")
    unnamed = CallContext(headers={"x-client-id": "h"})
    admission = make_controller(client_key_header="x-client-id")
    assert ["key", "h", ""] == [admission.client_of(one) for one in (named, unnamed, CallContext())]
    assert ["key", ""] == [make_controller().client_of(one) for one in (named, unnamed)]


def test_what_is_too_late_is_refused_at_once() -> None:
    """A deadline that has passed, and one that half of the latest answers did not meet."""
    clock = Clock()
    admission = make_controller(clock)
    for _ in range(20):
        with enter(admission):
            pass
        with enter(admission):
            clock.now_ns = S + S // 10
        clock.now_ns = S
    inside = enter(admission)
    with pytest.raises(DeadlineExceededError, match="before any work"):
        enter(admission, left_s=-1)
    admission.limit("graph", "g").median_ns = 0.1 * S
    with pytest.raises(DeadlineExceededError, match=r"50\.0 ms are left, and half .* more than 100\.0 ms") as caught:
        enter(admission, left_s=0.05)
    assert caught.value.is_refused
    with inside, enter(admission, left_s=0.2):
        pass
    assert {("deadline", 2): 2} == admission.limit("graph", "g").refusals


def adaptive_controller(maximum: int) -> tuple[AdmissionController, list[Permit]]:
    """A controller whose graph has this many in flight, as many as it may."""
    admission = make_controller(is_adaptive=True)
    limit = admission.limit("graph", "g")
    limit.set_maximum(maximum)
    limit.maximum = 0  # as ``admission.limit`` is told in these tests
    limit.median_ns = 10.0 * S  # long enough to wait for
    return admission, [enter(admission) for _ in range(maximum)]


async def test_who_waits_comes_in_when_a_place_is_free() -> None:
    """The highest level first, whoever came first."""
    admission, inside = adaptive_controller(2)
    low, high = enter(admission, 3), enter(admission, 1)
    assert low.is_waiting
    assert (4, 2, 2) == (admission.router.num_inflight, low.limit.num_inflight, len(low.limit.queue))
    with inside[0]:
        pass
    await high.wait()
    assert (0, S) == (low.start_ns, high.start_ns)
    with low, high, inside[1]:
        pass
    assert (0, 0, 0) == (admission.router.num_inflight, low.limit.num_inflight, len(low.limit.queue))


async def test_in_a_full_line_the_lower_level_gives_way() -> None:
    """Who gives way is told when to come back; a request that nobody is below of is refused at once."""
    admission, _ = adaptive_controller(2)
    low = [enter(admission, 3), enter(admission, 3)]
    high = enter(admission, 1)
    with pytest.raises(ResourceExhaustedError, match="are kept for priorities above 3") as caught, low[0]:
        await low[0].wait()
    assert caught.value.retry_after_ms
    with pytest.raises(ResourceExhaustedError):
        enter(admission, 3)
    assert high.is_waiting
    assert [("priority", 3)] == [key for key in high.limit.refusals if key[0] == "priority"]


async def test_a_client_with_its_share_does_not_wait() -> None:
    """Where others are, so that one client cannot fill the line."""
    admission = make_controller(is_adaptive=True)
    limit = admission.limit("graph", "g")
    for client in ["hog"] * 17 + ["a", "b", "c"]:
        enter(admission, client=client)
    with pytest.raises(ResourceExhaustedError):
        enter(admission, client="hog")
    assert enter(admission, client="a").is_waiting
    assert (20, 1) == (limit.num_inflight, len(limit.queue))


async def test_a_level_that_was_refused_counts_as_seen() -> None:
    """So places are kept for it when it comes again."""
    admission = make_controller(max_inflight=2)
    with enter(admission, 3):
        inside = enter(admission, 3)
        with pytest.raises(ResourceExhaustedError):
            admission.check(admission.limit("graph", "g"), 1, "", CallContext(arrival_ns=S))
    with inside, pytest.raises(ResourceExhaustedError, match="kept for priorities above 3"):
        enter(admission, 3)


async def test_who_waits_too_long_or_gives_up_is_forgotten() -> None:
    """Nothing of it is left, and it costs the others nothing."""
    admission, _ = adaptive_controller(2)
    limit = admission.limit("graph", "g")

    async def request() -> None:
        with enter(admission, 2) as permit:
            await permit.wait()

    given_up = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert 1 == len(limit.queue)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    limit.median_ns = 0.0
    with pytest.raises(ResourceExhaustedError, match="no place became free in time"):
        await request()
    assert (0, 2, 2) == (len(limit.queue), limit.num_inflight, admission.router.num_inflight)


async def test_a_place_that_is_given_to_one_that_gives_up_meanwhile_is_free_again() -> None:
    """It is cancelled after it was admitted and before it has noticed."""
    admission, inside = adaptive_controller(1)

    async def request() -> None:
        with enter(admission) as permit:
            await permit.wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    with inside[0]:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (0, 0) == (admission.limit("graph", "g").num_inflight, admission.router.num_inflight)


async def test_who_waits_and_cannot_be_answered_any_more_is_refused() -> None:
    """When its turn comes; the next one gets the place."""
    admission, inside = adaptive_controller(1)
    limit = admission.limit("graph", "g")
    patient, hurried = enter(admission), enter(admission, left_s=1)
    admission.clock_ns.now_ns += 2 * S  # type: ignore[attr-defined]
    with inside[0]:
        pass
    await patient.wait()
    with pytest.raises(DeadlineExceededError), hurried:
        await hurried.wait()
    assert 1 == limit.num_inflight


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), Outcome.WITHDRAWN),
        (GeneratorExit(), Outcome.WITHDRAWN),
        (DeadlineExceededError("late"), Outcome.WITHDRAWN),
        (ResourceExhaustedError("full"), Outcome.REFUSED),
        (WeftError("?"), Outcome.FAILED),
        (ValueError("?"), Outcome.FAILED),
    ],
)
def test_what_an_error_says_of_the_load(error: BaseException, outcome: Outcome) -> None:
    """Only what was refused behind, and what would have taken longer, says anything."""
    assert outcome is outcome_of(error)


async def test_nobody_waits_longer_than_its_deadline_allows() -> None:
    """Whatever the median latency; the status is that of a deadline."""
    admission, _ = adaptive_controller(1)
    limit = admission.limit("graph", "g")
    admission.clock_ns = time.monotonic_ns
    context = CallContext(deadline_ns=time.monotonic_ns() + S // 20)
    with pytest.raises(DeadlineExceededError), admission.admit(limit, 2, "", context) as permit:
        async with asyncio.timeout(5):
            await permit.wait()


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_versions_of_both_kinds_share_one_limit(is_adaptive: bool) -> None:
    """Calls of a version that streams do not make a new limit for the one that does not, nor the other way round."""
    admission = make_controller(is_adaptive=is_adaptive)
    for i in range(2):
        limit = admission.limit("graph", "g", 2, is_stream=bool(i % 2))
        admission.admit(limit, 2, "", CallContext(arrival_ns=S))
    for is_stream in (False, True):
        limit = admission.limit("graph", "g", 2, is_stream=is_stream)
        assert (2, 2) == (limit.limit, limit.num_inflight)
        with pytest.raises(ResourceExhaustedError, match="'max_inflight' of the graph's policy allows 2"):
            admission.admit(limit, 2, "", CallContext(arrival_ns=S))


def test_unused_limits_are_forgotten() -> None:
    """When there are too many; those with requests in flight stay."""
    admission = make_controller()
    used = admission.limit("model", "used")
    used.enter("", 0)
    for i in range(3 * MAX_LIMITS):
        admission.limit("model", str(i))
    assert len(admission.limits) <= MAX_LIMITS
    assert used is admission.limit("model", "used")


def test_one_line_a_second_tells_of_refusals(caplog: pytest.LogCaptureFixture) -> None:
    """With the number of them."""
    admission = make_controller(max_inflight=1)
    limit = admission.limit("graph", "g")
    enter(admission)
    with caplog.at_level(logging.WARNING, "weft.router.admission"):
        for i in range(2500):
            with pytest.raises(ResourceExhaustedError):
                admission.admit(limit, 2, "", CallContext(arrival_ns=S + i * 1_000_000))
    assert [1, 1000, 1000] == [record.num_refused for record in caplog.records]  # type: ignore[attr-defined]
