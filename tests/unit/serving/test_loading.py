"""What loads of different models share: the turn to import."""

import json
import threading

import pytest

from weft.serving.backends import loading


@pytest.fixture
def other_import():
    """A thread that imports until the test ends, and is importing now."""
    has_begun, may_end = threading.Event(), threading.Event()

    def run():
        with loading.importing():
            has_begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert has_begun.wait(10)
    yield thread
    may_end.set()
    thread.join()


def test_one_load_imports_at_a_time(other_import):
    """While one load imports, another one cannot begin to."""
    assert not loading._import_lock.acquire(timeout=0)


def test_an_import_that_hangs_holds_up_nobody_for_ever(other_import, monkeypatch):
    """After a while a load imports beside one that does not come to its end."""
    monkeypatch.setattr(loading, "IMPORT_WAIT_S", 0.01)
    assert json is loading.require("json", "none")
    assert other_import.is_alive()
