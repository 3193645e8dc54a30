"""A link to servers in memory."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.wire.client.scripted import ScriptedDialler, make_link

from weft.wire.client.link import Link


@pytest.fixture
def dialler() -> ScriptedDialler:
    """Gives connections when the test says so."""
    return ScriptedDialler()


@pytest.fixture
async def link(dialler: ScriptedDialler) -> AsyncIterator[Link]:
    """A link with options of the default, closed at the end."""
    made = make_link(dialler)
    yield made
    await made.close(None)
