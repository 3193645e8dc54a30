"""A target, and a clock that jumps."""

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.virtual_clock import VirtualClock


@pytest.fixture
def target() -> FakeTarget:
    """A target that serves `double`."""
    target = FakeTarget()
    make.serve(target, "double")
    return target


@pytest.fixture
async def virtual_clock() -> VirtualClock:
    """The clock of the test's loop, which jumps; see `virtual_clock.py`."""
    return VirtualClock()
