"""What the routers of a group share about rollouts."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.machine import RolloutState

Json = Any
_FORMAT = 1


@dataclass(slots=True)
class Document:
    """The shared state.

    Attributes:
        rollouts: By ``Rollout.key``: graph, node, plan, state, and the counts of both sides at the last decision.
        counts: Of rollouts that are not over, by member, then key; they stay when the member ends.
        owner: Name of the member that decides; "" if none does.
    """

    rollouts: dict[str, Json] = field(default_factory=dict)
    counts: dict[str, Json] = field(default_factory=dict)
    owner: str = ""

    @property
    def text(self) -> str:
        """As it is kept, without the owner."""
        return json.dumps({"format": _FORMAT, "rollouts": self.rollouts, "counts": self.counts})

    @classmethod
    def parse(cls, text: str | bytes) -> "Document":
        """Read ``text``. Raises ValueError: it is damaged, or of another format."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
            found = cls(content["rollouts"], content["counts"])
            for entry in found.rollouts.values():
                RolloutState.from_json(entry["state"])
                plan_of(entry)
                entry["graph"], entry["node"], entry["counts"]
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it is not what a router writes: {error!r}") from error
        return found


def plan_of(entry: Json) -> RolloutPlan:
    """The plan in an entry of ``rollouts``."""
    sequences = {name: tuple(entry["plan"][name]) for name in ("weights", "shares")}
    return RolloutPlan(**{**entry["plan"], **sequences})


class SharedState(Protocol):
    """Where a group keeps it. The methods block, so a thread calls them, and raise OSError.

    Attributes:
        member: Name of this process in the group.
        period_s: How often it looks, in seconds.
    """

    member: str
    period_s: float

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Let ``edit`` change the document, and keep it if that returns True; a newer one may have it run again.

        This member becomes the owner if there is none.
        """

    def close(self) -> None:
        """Give ownership up."""
