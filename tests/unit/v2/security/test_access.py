"""Limits and rights of a key, on a clock that the test moves: the cases of ``rings.txt``."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from tests.wire.notation import Case, read_cases

from weft.base import errors
from weft.base.security.access import KeyRing, TokenBucket
from weft.base.security.keys import new_key


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Ring:
    """A key ring over one file, and keys by name; the ring is made when it is first asked."""

    def __init__(self, path, caplog):
        self._path = path
        self._caplog = caplog
        self._clock = Clock()
        self._keys = {}
        self._lines = {}
        self._num_workers = 1
        self._ring = None
        self._held = {}
        self._kept = {}

    def key(self, name, *fields):
        if name not in self._keys:
            self._keys[name], line = new_key(name)
            self._lines[name] = json.loads(line)
        entry = {k: v for k, v in self._lines[name].items() if k in ("name", "sha256")}
        for field in fields:
            place, _, value = field.partition("=")
            entry[place] = json.loads(value)
        self._lines[name] = entry
        self.file()

    def drop(self, name):
        del self._lines[name]
        self.file()

    def file(self, *text):
        if text == ("gone",):
            self._path.unlink()
            return
        draft = self._path.with_suffix(".new")
        draft.write_text(" ".join(text) or "\n".join(map(json.dumps, self._lines.values())))
        os.replace(draft, self._path)

    def workers(self, number):
        self._num_workers = int(number)

    def after(self, seconds):
        self._clock.now_s += float(seconds)

    def keep(self, name):
        self._kept[name] = self._caller(name)

    def kept(self, verb, name, *rest):
        getattr(self, verb)(name, *rest, caller=self._kept[name])

    def admit(self, name, model="m", caller=None):
        caller = caller or self._caller(name)
        caller.check_model(model)
        with caller.admitted(model):
            pass

    def refuse(self, name, model, error, *text, caller=None):
        with pytest.raises(getattr(errors, error), match=" ".join(text) or None) as caught:
            self.admit(name, model.encode().decode("unicode_escape"), caller)
        assert caught.value.message.isascii()
        assert caught.value.message.isprintable()
        if error == "ResourceExhaustedError":
            assert caught.value.retry_after_ms > 0

    def hold(self, name):
        stack = contextlib.ExitStack()
        stack.enter_context(self._caller(name).admitted("m"))
        self._held.setdefault(name, []).append(stack)

    def end(self, name):
        self._held[name].pop().close()
        assert len(self._held[name]) == self._caller(name).num_inflight

    def fail(self, name):
        with contextlib.suppress(ValueError), self._held[name].pop():
            raise ValueError("failed")

    def priority(self, name, asked, got):
        parameters = {"priority": json.loads(asked)} if asked != "null" else {}
        self._caller(name).clamp_priority(parameters)
        assert json.loads(got) == parameters.get("priority")

    def show(self, *words):
        text, _, expected = " ".join(words).partition("->")
        headers = [header.partition(": ") for header in text.split(", ") if header.strip()]
        metadata = [(name.strip().rstrip(":"), self._filled(value.strip())) for name, _, value in headers]
        expected, *reason = expected.split()
        if not reason:
            assert expected == self._opened.identify(metadata).name
            return
        before = self._opened.refusals.get(("", *reason), 0)
        with pytest.raises(errors.UnauthenticatedError) as caught:
            self._opened.identify(metadata)
        assert before + 1 == self._opened.refusals["", *reason]
        assert "shop.x" not in caught.value.message
        assert caught.value.is_refused

    def logged(self, number):
        lines = [record.getMessage() for record in self._caplog.records]
        assert int(number) == sum("the old ones stay in force" in line for line in lines)

    def _filled(self, value):
        for name, key in self._keys.items():
            value = value.replace(f"{{{name}}}", key)
        return value

    def _caller(self, name):
        return self._opened.identify((("authorization", f"Bearer {self._keys[name]}"),))

    @property
    def _opened(self):
        self._ring = self._ring or KeyRing([self._path], clock_s=self._clock, num_workers=self._num_workers)
        return self._ring


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("rings.txt")), ids=lambda case: case.name)
def test_ring(case: Case, tmp_path, caplog):
    """Each line holds, one after the other."""
    ring = Ring(tmp_path / "keys", caplog)
    for line in case.lines:
        verb, *rest = line.split(" ")
        getattr(ring, verb)(*rest)


def test_bucket_gives_burst_then_rate():
    """A full bucket gives its burst, then one each period, and says how long that takes; a refusal costs nothing."""
    clock = Clock()
    bucket = TokenBucket(clock)
    for pause_s in (0.0, 3600.0):
        clock.now_s += pause_s
        assert [0.0] * 5 == [bucket.take(10, 5) for _ in range(5)]
        assert bucket.take(10, 5) == pytest.approx(0.1)
        clock.now_s += 0.1
        assert 0.0 == bucket.take(10, 5)
        assert bucket.take(10, 5) == pytest.approx(0.1)
    bucket, served = TokenBucket(clock), 0
    for _ in range(1000):
        served += bucket.take(10, 1) == 0.0
        clock.now_s += 0.01
    assert 100 <= served <= 101
