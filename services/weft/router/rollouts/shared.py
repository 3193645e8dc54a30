"""What the routers of one group share about rollouts: a document, its owner, and the counts of each member."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: Of the document; one of another format is kept aside, and rollouts begin anew.
FORMAT = 1

Json = Any


@dataclass(slots=True)
class Document:
    """The shared state.

    Attributes:
        rollouts: By ``Rollout.key``.
        owner: Name of the member that decides; "" if none does.
    """

    rollouts: dict[str, dict[str, Json]] = field(default_factory=dict)
    owner: str = ""

    @property
    def text(self) -> str:
        """As it is kept; the owner is kept elsewhere."""
        return json.dumps({"format": FORMAT, "rollouts": self.rollouts})


def parsed(text: str | bytes) -> dict[str, dict[str, Json]]:
    """The rollouts of a document. Raises ValueError if it is damaged or of another format."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it has no 'format': {FORMAT}")
    rollouts = content.get("rollouts")
    if not isinstance(rollouts, dict) or not all(isinstance(entry, dict) for entry in rollouts.values()):
        raise ValueError("'rollouts' is no object of objects")
    return rollouts


class SharedState(Protocol):
    """Where the members keep it. Every method may block for I/O, so a thread calls it; each raises OSError.

    Attributes:
        member: Name of this process among the members.
        period_s: How often members look, in seconds.
    """

    member: str
    period_s: float

    def own(self) -> str:
        """Become or remain the owner if no other member is; return the owner's name."""

    def read(self) -> Document:
        """The document; empty if there is none, or it is damaged."""

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Apply ``edit``, and keep the result if it returns True; it may run again on a newer document."""

    def tell(self, counts: Json) -> None:
        """Replace the counts of this member; they stay when it ends."""

    def counts(self) -> Mapping[str, Json]:
        """The counts of all members, living or not."""

    def drop(self, members: Iterable[str]) -> None:
        """Remove the counts of members."""

    def close(self) -> None:
        """Give ownership up."""
