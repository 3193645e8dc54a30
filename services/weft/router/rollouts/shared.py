"""What the routers of a group share about rollouts."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.machine import PAUSED, RUNNING, RolloutState

Json = Any
_FORMAT = 1


@dataclass(slots=True)
class Document:
    """The shared state.

    Attributes:
        rollouts: By ``Rollout.key``: graph, node, plan, state, the counts of both sides at the last decision, and when
            it is followed.
        counts: Of rollouts that are not over, by member, then key; they stay when the member ends.
        owner: Name of the member that decides.
    """

    rollouts: dict[str, Json] = field(default_factory=dict)
    counts: dict[str, Json] = field(default_factory=dict)
    owner: str = ""

    @property
    def text(self) -> str:
        """As it is kept, without the owner."""
        return json.dumps({"format": _FORMAT, "rollouts": self.rollouts, "counts": self.counts}, separators=(",", ":"))

    def drop_counts(self) -> None:
        """Of rollouts that are over; their verdicts have the figures."""
        for entry in (one for one in self.rollouts.values() if not is_open(one)):
            entry["counts"] = []
            entry["state"] |= {"candidate_before": {}, "baseline_before": {}}

    @classmethod
    def parse(cls, text: str | bytes) -> "Document":
        """Read ``text``. Raises ValueError: it is damaged, or of another format."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
            for entry in content["rollouts"].values():
                plan_of(entry), entry["state"]["revision"], entry["from_unix_ns"]
            return cls(content["rollouts"], content["counts"])
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no router wrote it: {error!r}") from error


def plan_of(entry: Json) -> RolloutPlan:
    """The plan in an entry of ``rollouts``."""
    plan = entry["plan"]
    return RolloutPlan(**plan | {name: tuple(plan[name]) for name in ("weights", "shares")})


def state_of(entry: Json) -> RolloutState:
    """The state in an entry of ``rollouts``."""
    return RolloutState.from_json(entry["state"])


def is_open(entry: Json) -> bool:
    """Whether an entry is of a rollout that is not over."""
    return entry is not None and entry["state"]["phase"] in (RUNNING, PAUSED)


class Ownership:
    """Who decides: a name that its owner renews, in the fields of a Lease's ``spec``, by the rule of client-go.

    It runs out ``duration_s`` after this process saw its last renewal, so clocks may differ. It is asked for in each
    change: an owner that hung finds that it lost it before it decides.

    Source:
        https://pkg.go.dev/k8s.io/client-go/tools/leaderelection
    """

    def __init__(self, member: str, duration_s: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.member, self._duration_s, self._clock_s = member, duration_s, clock_s
        self._seen: Json = None
        self._seen_at_s = 0.0

    def hold(self, spec: Json) -> bool:
        """Take it if it is free or has run out, renew it if it is this member's; False if it is another's."""
        if spec != self._seen:
            self._seen, self._seen_at_s = dict(spec), self._clock_s()
        holder, now = spec.get("holderIdentity"), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self.member:
            if holder and self._seen_at_s + spec.get("leaseDurationSeconds", 0) > self._clock_s():
                return False
            spec |= {"leaseTransitions": spec.get("leaseTransitions", -1) + 1, "acquireTime": now}
        spec |= {"holderIdentity": self.member, "leaseDurationSeconds": self._duration_s, "renewTime": now}
        return True

    def release(self, spec: Json) -> bool:
        """Free it, so that the next owner need not wait; False if it is another's."""
        if is_mine := spec.get("holderIdentity") == self.member:
            spec |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        return bool(is_mine)


class SharedState(Protocol):
    """Where a group keeps it; the methods block, and raise OSError.

    Attributes:
        member: Name of this process in the group.
        period_s: How often it looks, in seconds.
    """

    member: str
    period_s: float

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Let ``edit`` change the document, and keep it if that returns True; it may run again, on a newer one.

        This member becomes the owner if there is none.
        """

    def close(self) -> None:
        """Give ownership up."""
