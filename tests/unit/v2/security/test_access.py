"""Limits and rights of a key, on a clock that the test moves."""

import contextlib
import json
import os

import pytest

from weft.base.errors import PermissionDeniedError, ResourceExhaustedError, UnauthenticatedError
from weft.base.security.access import KeyRing, TokenBucket
from weft.base.security.keys import new_key


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Ring:
    """A key ring over one file, and keys by name."""

    def __init__(self, path):
        self.path = path
        self.clock = Clock()
        self.keys = {}
        self.lines = {}

    def put(self, name, **fields):
        if name not in self.keys:
            self.keys[name], line = new_key(name)
            self.lines[name] = json.loads(line)
        self.lines[name] = {k: v for k, v in self.lines[name].items() if k in ("name", "sha256")} | fields
        self.write()

    def write(self, text=None):
        draft = self.path.with_suffix(".new")
        draft.write_text(text or "\n".join(map(json.dumps, self.lines.values())))
        os.replace(draft, self.path)

    def open(self):
        self.ring = KeyRing([self.path], clock_s=self.clock)

    def caller(self, name):
        return self.ring.identify((("authorization", f"Bearer {self.keys[name]}"),))


@pytest.fixture
def keys(tmp_path):
    """A file with the key ``shop``, which has no limits."""
    ring = Ring(tmp_path / "keys")
    ring.put("shop")
    ring.open()
    return ring


def test_bucket_gives_burst_then_rate():
    """A full bucket gives its burst at once, then one each period, and says how long the next one takes."""
    clock = Clock()
    bucket = TokenBucket(clock)
    assert [0.0] * 5 == [bucket.take(10, 5) for _ in range(5)]
    assert bucket.take(10, 5) == pytest.approx(0.1)
    clock.now_s += 0.1
    assert 0.0 == bucket.take(10, 5)
    assert bucket.take(10, 5) == pytest.approx(0.1)
    clock.now_s += 3600
    assert [0.0] * 5 == [bucket.take(10, 5) for _ in range(5)]
    assert bucket.take(10, 5) > 0


def test_refused_request_costs_no_token():
    """A client that hammers is served at its rate all the same: what is refused takes nothing from the bucket."""
    clock = Clock()
    bucket = TokenBucket(clock)
    served = 0
    for _ in range(1000):
        served += bucket.take(10, 1) == 0.0
        clock.now_s += 0.01
    assert 100 <= served <= 101


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Bearer {}")],
        [("authorization", "bearer {}")],
        [("x-api-key", "{}")],
        [("authorization", "Bearer {}"), ("x-api-key", "{}")],
        [("authorization", "Basic Zm9v"), ("x-api-key", "{}")],
    ],
)
def test_both_headers_carry_the_key(keys, metadata):
    """A key is found as a bearer token and as ``x-api-key``; another scheme beside it does not matter."""
    shown = [(name, value.format(keys.keys["shop"])) for name, value in metadata]
    assert "shop" == keys.ring.identify(shown).name


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "missing"),
        ([("authorization", "shop.x")], "missing"),
        ([("x-api-key-bin", b"x")], "missing"),
        ([("x-api-key", "")], "wrong"),
        ([("x-api-key", "shop.x")], "wrong"),
        ([("x-api-key", "a.b"), ("x-api-key", "c.d")], "several"),
    ],
)
def test_no_valid_key_is_unauthenticated(keys, metadata, reason):
    """Without a key, with a wrong one and with two, nobody is let in; it is counted, and the key is not repeated."""
    with pytest.raises(UnauthenticatedError) as caught:
        keys.ring.identify(metadata)
    assert {("", reason): 1} == keys.ring.refusals
    assert "shop.x" not in caught.value.message
    assert caught.value.is_refused


def test_models_are_globs(keys):
    """Only models that a glob of the key fits may be used; names are compared by case."""
    keys.put("lab", models=["digits*", "t?"])
    keys.open()
    lab = keys.caller("lab")
    for name in ("digits", "digits_fast", "t1"):
        lab.check_model(name)
    for name in ("Digits", "a/digits", "t12", "", "secret\n\u202e"):
        with pytest.raises(PermissionDeniedError) as caught:
            lab.check_model(name)
        assert caught.value.message.isascii()
        assert caught.value.message.isprintable()


def test_inflight_limit_is_exact_and_given_back(keys):
    """As many requests as the key allows are in work, the next is refused with a hint, and each end makes room."""
    keys.put("shop", max_inflight=2)
    keys.open()
    shop = keys.caller("shop")
    with shop.admitted("m"):
        with contextlib.suppress(ValueError), shop.admitted("m"):
            with pytest.raises(ResourceExhaustedError) as caught, shop.admitted("m"):
                pass
            assert caught.value.retry_after_ms > 0
            raise ValueError("failed")
        with shop.admitted("m"):
            assert 2 == shop.num_inflight
    assert 0 == shop.num_inflight


def test_rate_limit_says_when_to_come_again(keys):
    """The request over the rate is refused with the time after which it is served."""
    keys.put("shop", requests_per_s=4, burst=1)
    keys.open()
    shop = keys.caller("shop")
    with shop.admitted("m"):
        pass
    with pytest.raises(ResourceExhaustedError) as caught, shop.admitted("m"):
        pass
    assert 251 == caught.value.retry_after_ms
    keys.clock.now_s += 0.251
    with shop.admitted("m"):
        pass


def test_workers_divide_the_limits_of_a_key(keys):
    """Each of two has half of the rate and of the requests in flight, rounded up, and says so."""
    keys.put("shop", max_inflight=3)
    keys.put("mill", requests_per_s=10, burst=5)
    ring = KeyRing([keys.path], clock_s=keys.clock, num_workers=2)
    shop, mill = (ring.identify((("x-api-key", keys.keys[name]),)) for name in ("shop", "mill"))
    with shop.admitted("m"), shop.admitted("m"):
        text = "has 2 requests in flight, as many as max_inflight, divided among 2 workers, allows"
        with pytest.raises(ResourceExhaustedError, match=text), shop.admitted("m"):
            pass
    for _ in range(3):
        with mill.admitted("m"):
            pass
    text = "allows 10 requests a second and 5 at once, divided among 2 workers; try again in 201 ms"
    with pytest.raises(ResourceExhaustedError, match=text), mill.admitted("m"):
        pass
    keys.clock.now_s += 0.2
    with mill.admitted("m"):
        pass


def test_limits_of_one_key_do_not_touch_another(keys):
    """A client that uses up what it has leaves the others theirs."""
    keys.put("shop", requests_per_s=1)
    keys.put("lab", requests_per_s=1)
    keys.open()
    for name in ("shop", "lab"):
        with keys.caller(name).admitted("m"):
            pass
        with pytest.raises(ResourceExhaustedError), keys.caller(name).admitted("m"):
            pass


@pytest.mark.parametrize(("asked", "got"), [(1, 3), (2, 3), (3, 3), (9, 9), (0, 0), (True, True), ("1", "1")])
def test_better_priority_is_lowered(keys, asked, got):
    """A level above the best that the key allows becomes that one; the default, worse ones and odd values stay."""
    keys.put("shop", highest_priority=3)
    keys.open()
    parameters = {"priority": asked}
    keys.caller("shop").clamp_priority(parameters)
    assert {"priority": got} == parameters


def test_absent_priority_stays_absent(keys):
    """A request without a priority gets none."""
    keys.put("shop", highest_priority=3)
    keys.open()
    parameters = {}
    keys.caller("shop").clamp_priority(parameters)
    assert {} == parameters


def test_changed_file_is_taken_over(keys):
    """A key that is added opens within the period of looks; one that is removed does not, nor do its open streams."""
    shop = keys.caller("shop")
    keys.put("lab")
    with pytest.raises(UnauthenticatedError):
        keys.caller("lab")
    keys.clock.now_s += 1
    assert "lab" == keys.caller("lab").name
    del keys.lines["shop"]
    keys.write()
    keys.clock.now_s += 1
    with pytest.raises(UnauthenticatedError):
        keys.caller("shop")
    with pytest.raises(UnauthenticatedError, match="not valid any more"):
        shop.check_model("m")


def test_open_stream_ends_where_nobody_else_calls(keys):
    """A stream sees that its key is gone at its next request, also where no other call has looked at the file."""
    shop = keys.caller("shop")
    keys.put("lab")
    del keys.lines["shop"]
    keys.write()
    keys.clock.now_s += 1
    with pytest.raises(UnauthenticatedError, match="not valid any more"), shop.admitted("m"):
        pass


def test_new_rate_counts_from_now(keys):
    """What was used at a low rate, 1000 seconds' worth, is not owed at a higher one."""
    keys.put("shop", requests_per_s=0.1, burst=100)
    keys.open()
    for _ in range(100):
        with keys.caller("shop").admitted("m"):
            pass
    keys.put("shop", requests_per_s=1000)
    keys.clock.now_s += 1
    with keys.caller("shop").admitted("m"):
        pass


def test_new_line_with_the_same_rate_gives_no_new_burst(keys):
    """A file that is written again refills nothing."""
    keys.put("shop", requests_per_s=0.1)
    keys.open()
    with keys.caller("shop").admitted("m"):
        pass
    keys.put("shop", requests_per_s=0.1, max_inflight=9)
    keys.clock.now_s += 1
    with pytest.raises(ResourceExhaustedError), keys.caller("shop").admitted("m"):
        pass


def test_changed_limits_hold_for_requests_in_work(keys):
    """New limits count what is in flight already."""
    with keys.caller("shop").admitted("m"):
        keys.put("shop", max_inflight=1)
        keys.clock.now_s += 1
        with pytest.raises(ResourceExhaustedError), keys.caller("shop").admitted("m"):
            pass


@pytest.mark.parametrize("text", ["{broken", "# all gone\n", None])
def test_bad_new_file_keeps_the_old_one(keys, caplog, text):
    """A file that is broken, emptied or gone changes nothing, and the log says so once, not at each call."""
    if text is None:
        keys.path.unlink()
    else:
        keys.write(text)
    for _ in range(3):
        keys.clock.now_s += 1
        assert "shop" == keys.caller("shop").name
    assert 1 == sum("the old ones stay in force" in record.getMessage() for record in caplog.records)
    keys.put("lab")
    keys.clock.now_s += 1
    assert "lab" == keys.caller("lab").name
