"""What graphs share while they run."""

import pytest

from weft.base.errors import ResourceExhaustedError
from weft.router.runtime import Runtime


def test_workers_divide_the_limits_of_graphs() -> None:
    """One of three may have a third, rounded up, and says so; no limit stays none."""
    runtime = Runtime({}, num_workers=3)
    assert [0, 1, 1, 2] == [runtime.share(limit) for limit in (0, 1, 3, 4)]
    limit = runtime.inflight_limit("step 'root/a'", 4)
    limit.enter()
    limit.enter()
    text = "step 'root/a' has 2 requests in flight, and 'max_inflight' of its policy, divided among 3 workers, allows 2"
    with pytest.raises(ResourceExhaustedError, match=text):
        limit.enter()
    unlimited = Runtime({}).inflight_limit("node 'a'", 0)
    for _ in range(100):
        unlimited.enter()
