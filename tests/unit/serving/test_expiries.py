"""Times at which requests are too late."""

import pytest

from weft.base.core import CallContext, InferCall
from weft.serving.queues.queue import Expiries
from weft.serving.request.request import InferenceRequest


@pytest.fixture
def requests():
    """Three requests with the numbers 0 to 2."""
    return [InferenceRequest(InferCall("m"), CallContext(), sequence=number) for number in range(3)]


def test_each_time_comes_once_in_order(requests):
    """A request with two times comes twice, others between; what is discarded comes no more."""
    expiries = Expiries()
    for request, expiry_ns in zip([*requests, requests[0]], (30, 20, 10, 5), strict=True):
        expiries.add(request, expiry_ns)
    expiries.discard(requests[2])
    assert 5 == expiries.next_ns()
    assert [requests[0], None] == [expiries.pop(5), expiries.pop(5)]
    assert [requests[1], requests[0], None] == [expiries.pop(50) for _ in range(3)]


def test_times_of_those_that_left_do_not_pile_up(requests):
    """A thousand times of a request that comes and goes leave no thousand entries."""
    expiries = Expiries()
    expiries.add(requests[1], 10**9)
    for expiry_ns in range(1000):
        expiries.add(requests[0], expiry_ns + 10**6)
        expiries.discard(requests[0])
    assert len(expiries._times) < 100
    assert ([requests[1]], 10**9) == (list(expiries.requests.values()), expiries.next_ns())
