"""Authorisation and rate limits of key holders. Policy without gRPC; the clock is passed in."""

import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weft.base.errors import (
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    WeftError,
)
from weft.base.limits import divided, share
from weft.base.security.files import ReloadingFiles
from weft.base.security.keys import Grant, grant_of, read_keys

#: Headers that carry a key. They are stripped: no model, condition or other service sees them.
KEY_HEADERS = frozenset({"authorization", "x-api-key"})

_BEARER = "bearer "
_MAX_RETRY_MS = 60_000
#: Retry hint when a client has too many requests in flight, in milliseconds.
_INFLIGHT_RETRY_MS = 50
_FORMS = "send it as 'authorization: Bearer KEY' or 'x-api-key: KEY'"

Metadata = Iterable[tuple[str, str | bytes]]


class TokenBucket:
    """Token bucket: limits the mean rate and the burst."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._full_at_s = float("-inf")  # when the bucket is full again

    def take(self, rate_per_s: float, burst: int) -> float:
        """Take a token and return 0.0; or take none and return the seconds until one is available."""
        now_s = self._clock_s()
        full_at_s = max(self._full_at_s, now_s) + 1 / rate_per_s
        wait_s = full_at_s - now_s - burst / rate_per_s
        if wait_s > 1e-9:
            return wait_s
        self._full_at_s = full_at_s
        return 0.0


class Principal:
    """An authenticated caller, the holder of a key or certificate, with its requests in flight.

    Args:
        grant: Its permissions and limits.
        refusals: Counts its rejected calls.
        refresh: Reloads changed files; otherwise a stream would outlive its revoked key if nobody else calls.
        num_workers: How many processes share its limits; this one has its part of each.

    Attributes:
        grant: Current permissions and limits.
        is_revoked: The key was removed; its streams end with UNAUTHENTICATED at their next request.
    """

    def __init__(
        self,
        grant: Grant,
        refusals: "Counter[tuple[str, str]]",
        clock_s: Callable[[], float],
        refresh: Callable[[], None],
        num_workers: int = 1,
    ) -> None:
        self.grant = grant
        self._num_workers = num_workers
        self.is_revoked = False
        self.num_inflight = 0
        self._bucket = TokenBucket(clock_s)
        self._clock_s = clock_s
        self._refusals = refusals
        self._refresh = refresh

    @property
    def name(self) -> str:
        """Name in the keys file."""
        return self.grant.name

    def update(self, grant: Grant) -> None:
        """Apply a changed line of the same name; a changed rate resets the token bucket."""
        if (grant.requests_per_s, grant.burst) != (self.grant.requests_per_s, self.grant.burst):
            self._bucket = TokenBucket(self._clock_s)
        self.grant = grant

    def check_model(self, model_name: str) -> None:
        """Check access to a graph or model. The error does not reveal whether it exists."""
        self._refresh()
        if self.is_revoked:
            raise self._denied("revoked", UnauthenticatedError(f"the key '{self.name}' is not valid any more"))
        if not self.grant.allows(model_name):
            text = f"key '{self.name}' does not allow {model_name[:80]!a}; it allows {', '.join(self.grant.models)}"
            raise self._denied("model", PermissionDeniedError(text))

    def check_right(self, right: str, what: str) -> None:
        """Check the right ``control`` or ``feedback``, which ``what`` requires."""
        if not getattr(self.grant, right):
            text = f"key '{self.name}' does not allow {what}; its line needs \"{right}\": true"
            raise self._denied(right, PermissionDeniedError(text))

    @contextlib.contextmanager
    def admitted(self, model_name: str) -> Iterator[None]:
        """Count one inference request in flight, within the limits.

        Raises:
            UnauthenticatedError, PermissionDeniedError: See ``check_model``.
            ResourceExhaustedError: A limit is exceeded; ``retry_after_ms`` says when to retry.
        """
        self.check_model(model_name)
        grant = self.grant
        num_workers = self._num_workers
        if grant.max_inflight and self.num_inflight >= share(grant.max_inflight, num_workers):
            text = (
                f"key '{self.name}' has {self.num_inflight} requests in flight, as many as "
                f"max_inflight{divided(num_workers)} allows"
            )
            raise self._denied("max_inflight", ResourceExhaustedError(text, retry_after_ms=_INFLIGHT_RETRY_MS))
        if grant.requests_per_s:
            burst = grant.burst or max(1, int(grant.requests_per_s))
            wait_s = self._bucket.take(grant.requests_per_s / num_workers, share(burst, num_workers))
            if wait_s:
                retry_after_ms = min(int(wait_s * 1e3) + 1, _MAX_RETRY_MS)
                text = (
                    f"key '{self.name}' allows {grant.requests_per_s:g} requests a second and {burst} at "
                    f"once{divided(num_workers).rstrip(',')}; try again in {retry_after_ms} ms"
                )
                raise self._denied("requests_per_s", ResourceExhaustedError(text, retry_after_ms=retry_after_ms))
        self.num_inflight += 1
        try:
            yield
        finally:
            self.num_inflight -= 1

    def clamp_priority(self, parameters: Any) -> None:
        """Lower a requested priority to the best level that the key allows.

        A request without a priority gets the model's default, which its owner chose.
        """
        best, asked = self.grant.highest_priority, parameters.get("priority", 0)
        if type(asked) is int and 0 < asked < best:
            parameters["priority"] = best

    def _denied(self, reason: str, error: WeftError) -> WeftError:
        self._refusals[self.name, reason] += 1
        return error.refused()


class KeyRing:
    """The principals of some keys files, which are reloaded when they change.

    Args:
        num_workers: As of ``Principal``.

    Attributes:
        refusals: Rejected calls, by principal ("" if unknown) and reason.

    Raises:
        InvalidArgumentError: A file is invalid.
    """

    def __init__(
        self, paths: Sequence[Path], *, clock_s: Callable[[], float] = time.monotonic, num_workers: int = 1
    ) -> None:
        self._num_workers = num_workers
        self.refusals: Counter[tuple[str, str]] = Counter()
        self._clock_s = clock_s
        self._file = ReloadingFiles(paths, lambda: read_keys(paths), clock_s=clock_s)
        self._principals: dict[str, Principal] = {}
        self._grants: dict[str, Grant] = {}
        self._names_by_certificate: dict[str, str] = {}
        self._refresh()

    @property
    def takes_certificates(self) -> bool:
        """Whether a client certificate can replace a key."""
        self._refresh()
        return bool(self._names_by_certificate)

    def identify(self, metadata: Metadata) -> Principal:
        """The principal whose key is in the headers. Raises UnauthenticatedError."""
        self._refresh()
        found = keys_in(metadata)
        if not found:
            raise self._unknown("missing", f"a key is needed; {_FORMS}")
        if len(found) > 1:
            raise self._unknown("several", f"several keys were sent; send one, {_FORMS[8:]}")
        grant = grant_of(self._grants, found.pop())
        if grant is None:
            raise self._unknown("wrong", "the key is not valid; send one of the service's --auth-keys files")
        return self._principal(grant.name)

    def identify_certificate(self, certificate_names: Iterable[str]) -> Principal:
        """The principal named in a verified client certificate. Raises UnauthenticatedError."""
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
            principal = Principal(self._grants[name], self.refusals, self._clock_s, self._refresh, self._num_workers)
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
                principal.update(grants[name])
            else:
                principal.is_revoked = True
                del self._principals[name]


def keys_in(metadata: Metadata) -> set[str]:
    """The keys in the headers."""
    found = set()
    for name, value in metadata:
        if name == "x-api-key" and isinstance(value, str):
            found.add(value.strip())
        elif name == "authorization" and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
            found.add(value[len(_BEARER) :].strip())
    return found


#: Caller of the current call; None without authentication.
CALLER: "contextvars.ContextVar[Principal | None]" = contextvars.ContextVar("weft_caller", default=None)

_OPEN: AbstractContextManager[None] = contextlib.nullcontext()


def caller_name() -> str:
    """Name of the caller; "" without authentication."""
    caller = CALLER.get()
    return "" if caller is None else caller.name


def admission(model_name: str) -> AbstractContextManager[None]:
    """``Principal.admitted`` of the caller."""
    caller = CALLER.get()
    return _OPEN if caller is None else caller.admitted(model_name)


def check_model(model_name: str) -> None:
    """``Principal.check_model`` of the caller."""
    if (caller := CALLER.get()) is not None:
        caller.check_model(model_name)


def check_right(right: str, what: str) -> None:
    """``Principal.check_right`` of the caller."""
    if (caller := CALLER.get()) is not None:
        caller.check_right(right, what)


def allows(model_name: str) -> bool:
    """Whether the caller may use, and so see, the graph or model."""
    caller = CALLER.get()
    return caller is None or caller.grant.allows(model_name)


def clamp_priority(parameters: Any) -> None:
    """``Principal.clamp_priority`` of the caller."""
    if (caller := CALLER.get()) is not None:
        caller.clamp_priority(parameters)
