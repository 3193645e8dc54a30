"""What the holder of a key may do, and how much of it. Policy without gRPC; the clock is passed in."""

import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weft_common.errors import (
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    WeftError,
)
from weft_common.security.files import Reloaded
from weft_common.security.keys import Grant, grant_of, read_keys

#: Headers that carry a key. They end here: no model, no condition and no other service sees them.
KEY_HEADERS = frozenset({"authorization", "x-api-key"})

_BEARER = "bearer "
_MAX_RETRY_MS = 60_000
#: A request that waits for another one of its client to end may try again after this, in milliseconds.
_INFLIGHT_RETRY_MS = 50
_FORMS = "send it as 'authorization: Bearer KEY' or 'x-api-key: KEY'"

Metadata = Iterable[tuple[str, str | bytes]]


class TokenBucket:
    """So many requests a second in the mean, and so many at once after a pause.

    Args:
        clock_s: Seconds that only grow.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._debt_s = float("-inf")  # when the bucket is full again

    def take(self, rate_per_s: float, burst: int) -> float:
        """Take one: 0.0; or nothing is taken, and the seconds until one is there are given."""
        now_s = self._clock_s()
        full_at_s = max(self._debt_s, now_s) + 1 / rate_per_s
        wait_s = full_at_s - now_s - burst / rate_per_s
        if wait_s > 1e-9:
            return wait_s
        self._debt_s = full_at_s
        return 0.0


class Principal:
    """Who calls: the holder of a key or certificate, with what is in work for it.

    Args:
        grant: What is allowed.
        refusals: Counts those of its calls that are refused.
        clock_s: Seconds that only grow.
        refresh: Takes over files that changed; without it a stream would outlive its key where nobody else calls.

    Attributes:
        grant: What is allowed now.
        is_revoked: The key's line is gone; streams that it began end with UNAUTHENTICATED at their next request.
    """

    def __init__(
        self,
        grant: Grant,
        refusals: "Counter[tuple[str, str]]",
        clock_s: Callable[[], float],
        refresh: Callable[[], None],
    ) -> None:
        self.grant = grant
        self.is_revoked = False
        self.num_inflight = 0
        self._bucket = TokenBucket(clock_s)
        self._clock_s = clock_s
        self._refusals = refusals
        self._refresh = refresh

    @property
    def name(self) -> str:
        """As in the file of keys."""
        return self.grant.name

    def take_over(self, grant: Grant) -> None:
        """A new line of the same name is in force; what is owed to another rate is forgotten."""
        if (grant.requests_per_s, grant.burst) != (self.grant.requests_per_s, self.grant.burst):
            self._bucket = TokenBucket(self._clock_s)
        self.grant = grant

    def check_model(self, model_name: str) -> None:
        """The graph or model may be used. Says the same whether there is one of that name or not."""
        self._refresh()
        if self.is_revoked:
            raise self._refused("revoked", UnauthenticatedError(f"the key '{self.name}' is not valid any more"))
        if not self.grant.allows(model_name):
            text = f"key '{self.name}' does not allow {model_name[:80]!a}; it allows {', '.join(self.grant.models)}"
            raise self._refused("model", PermissionDeniedError(text))

    def check_right(self, right: str, what: str) -> None:
        """The key has ``control`` or ``feedback``, which ``what`` needs."""
        if not getattr(self.grant, right):
            text = f"key '{self.name}' does not allow {what}; its line needs \"{right}\": true"
            raise self._refused(right, PermissionDeniedError(text))

    @contextlib.contextmanager
    def admitted(self, model_name: str) -> Iterator[None]:
        """One inference request is in work.

        Raises:
            UnauthenticatedError, PermissionDeniedError: As ``check_model``.
            ResourceExhaustedError: Too many are, or too many came; ``retry_after_ms`` says when to try again.
        """
        self.check_model(model_name)
        grant = self.grant
        if grant.max_inflight and self.num_inflight >= grant.max_inflight:
            text = f"key '{self.name}' has {self.num_inflight} requests in flight, as many as max_inflight allows"
            raise self._refused("max_inflight", ResourceExhaustedError(text, retry_after_ms=_INFLIGHT_RETRY_MS))
        if grant.requests_per_s:
            burst = grant.burst or max(1, int(grant.requests_per_s))
            wait_s = self._bucket.take(grant.requests_per_s, burst)
            if wait_s:
                retry_after_ms = min(int(wait_s * 1e3) + 1, _MAX_RETRY_MS)
                text = (
                    f"key '{self.name}' allows {grant.requests_per_s:g} requests a second and {burst} at once; try "
                    f"again in {retry_after_ms} ms"
                )
                raise self._refused("requests_per_s", ResourceExhaustedError(text, retry_after_ms=retry_after_ms))
        self.num_inflight += 1
        try:
            yield
        finally:
            self.num_inflight -= 1

    def lower_priority(self, parameters: Any) -> None:
        """A request that asks for a better level than the key allows asks for the best that it does.

        One that asks for none gets the model's default, which its owner chose.
        """
        best, asked = self.grant.highest_priority, parameters.get("priority", 0)
        if type(asked) is int and 0 < asked < best:
            parameters["priority"] = best

    def _refused(self, reason: str, error: WeftError) -> WeftError:
        self._refusals[self.name, reason] += 1
        return error.refused()


class KeyRing:
    """Every principal of some files of keys; the files are read again when they change.

    Args:
        paths: The files.
        clock_s: Seconds that only grow.

    Attributes:
        refusals: Calls that were refused, by principal ("" where it is unknown) and reason.

    Raises:
        InvalidArgumentError: The files are wrong.
    """

    def __init__(self, paths: Sequence[Path], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.refusals: Counter[tuple[str, str]] = Counter()
        self._clock_s = clock_s
        self._file = Reloaded(paths, lambda: read_keys(paths), clock_s=clock_s)
        self._principals: dict[str, Principal] = {}
        self._grants: dict[str, Grant] = {}
        self._names_by_certificate: dict[str, str] = {}
        self._refresh()

    @property
    def takes_certificates(self) -> bool:
        """Whether a client certificate may stand for a key."""
        self._refresh()
        return bool(self._names_by_certificate)

    def identify(self, metadata: Metadata) -> Principal:
        """Who sent these headers. Raises UnauthenticatedError."""
        self._refresh()
        found = keys_in(metadata)
        if not found:
            raise self._unknown("missing", f"a key is needed; {_FORMS}")
        if len(found) > 1:
            raise self._unknown("several", f"several keys were sent; send one, {_FORMS[8:]}")
        grant = grant_of(self._grants, found.pop())
        if grant is None:
            raise self._unknown("wrong", "the key is not valid")
        return self._principal(grant.name)

    def identify_certificate(self, certificate_names: Iterable[str]) -> Principal:
        """Whom a client's certificate, which was verified, names. Raises UnauthenticatedError."""
        self._refresh()
        known = self._names_by_certificate
        found = {known[name] for name in certificate_names if name in known}
        if not found:
            raise self._unknown("missing", f"a key is needed, or a client certificate with a known name; {_FORMS}")
        if len(found) > 1:
            raise self._unknown("several", f"the client certificate has names of several clients; {_FORMS}")
        return self._principal(found.pop())

    def _principal(self, name: str) -> Principal:
        principal = self._principals.get(name)
        if principal is None:
            principal = Principal(self._grants[name], self.refusals, self._clock_s, self._refresh)
            self._principals[name] = principal
        return principal

    def _unknown(self, reason: str, text: str) -> UnauthenticatedError:
        self.refusals["", reason] += 1
        return UnauthenticatedError(text).refused()

    def _refresh(self) -> None:
        grants = self._file.get()
        if grants is self._grants:
            return
        self._grants = grants
        self._names_by_certificate = {
            certificate: grant.name for grant in grants.values() for certificate in grant.certificates
        }
        for name, principal in list(self._principals.items()):
            if name in grants:
                principal.take_over(grants[name])
            else:
                principal.is_revoked = True
                del self._principals[name]


def keys_in(metadata: Metadata) -> set[str]:
    """The keys that headers carry."""
    found = set()
    for name, value in metadata:
        if name == "x-api-key" and isinstance(value, str):
            found.add(value.strip())
        elif name == "authorization" and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
            found.add(value[len(_BEARER) :].strip())
    return found


#: Who makes the call that runs in this context; None where no keys are asked for.
CALLER: "contextvars.ContextVar[Principal | None]" = contextvars.ContextVar("weft_caller", default=None)

_OPEN: AbstractContextManager[None] = contextlib.nullcontext()


def caller_name() -> str:
    """Name of who calls; "" where no keys are asked for."""
    caller = CALLER.get()
    return "" if caller is None else caller.name


def is_revoked() -> bool:
    """Whether who calls may not any more."""
    caller = CALLER.get()
    return caller is not None and caller.is_revoked


def admission(model_name: str) -> AbstractContextManager[None]:
    """``Principal.admitted`` of who calls."""
    caller = CALLER.get()
    return _OPEN if caller is None else caller.admitted(model_name)


def check_model(model_name: str) -> None:
    """``Principal.check_model`` of who calls."""
    if (caller := CALLER.get()) is not None:
        caller.check_model(model_name)


def check_right(right: str, what: str) -> None:
    """``Principal.check_right`` of who calls."""
    if (caller := CALLER.get()) is not None:
        caller.check_right(right, what)


def allows(model_name: str) -> bool:
    """Whether who calls may use, and so see, the graph or model."""
    caller = CALLER.get()
    return caller is None or caller.grant.allows(model_name)


def lower_priority(parameters: Any) -> None:
    """``Principal.lower_priority`` of who calls."""
    if (caller := CALLER.get()) is not None:
        caller.lower_priority(parameters)
