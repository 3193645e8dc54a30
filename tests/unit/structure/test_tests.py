"""What the tests of this repository have in common."""

import inspect

import pytest


def test_every_test_states_a_fact(request: pytest.FixtureRequest) -> None:
    """Each test function that is run with this one has a docstring, which is a sentence."""
    functions = [item for item in request.session.items if item.name.startswith("test_")]
    docs = {item.nodeid: inspect.getdoc(getattr(item, "function", None)) for item in functions}
    assert [] == [nodeid for nodeid, doc in docs.items() if not (doc or "").endswith((".", "!"))]
