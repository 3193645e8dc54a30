"""What a group of consumers has done of a partition of Kafka: ``PartitionProgress``."""

import contextlib
import json

#: Brokers take 4096 bytes of text with a commit: so many messages, a bit each, and so many runs of them.
_MAX_BITS, _MAX_RUNS = 8192, 32


class PartitionProgress:
    """What a group has done of a partition, as a commit says it: an offset, and a text that the broker keeps.

    The offset is that of the first unfinished message. The text says which messages behind it are answered, so that
    they do not come again, and how often the others were delivered.

    Args:
        offset: That was committed; -1: none.
        text: That was committed with it; one that another client wrote says nothing.

    Attributes:
        is_changed: There is something to commit.
    """

    def __init__(self, offset: int = -1, text: str = "") -> None:
        self._end = offset
        self._unfinished: set[int] = set()
        self._answered: set[int] = set()
        #: Times that messages were given back, which come again.
        self._given_back: dict[int, int] = {}
        #: Deliveries to earlier consumers: the offset behind a run of messages, and their count; in order.
        self._runs: list[tuple[int, int]] = []
        self.is_changed = False
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = json.loads(text)
            bits = f"{int(said['answered'] or '0', 16):b}"
            self._runs = [(int(end), int(count)) for end, count in said["delivered"]]
            self._answered = {offset + place for place, bit in enumerate(reversed(bits)) if bit == "1"}

    @property
    def offset(self) -> int:
        """Of the first unfinished message, or of the one to come."""
        return min(self._unfinished.union(self._given_back), default=self._end)

    @property
    def is_idle(self) -> bool:
        """No message is in work."""
        return not self._unfinished

    def deliver(self, offset: int) -> int:
        """A message came: the times it was delivered, this one included; 0 if it is answered already."""
        self._end = max(self._end, offset + 1)
        self.is_changed = True
        if offset in self._answered:
            return 0
        self._unfinished.add(offset)
        return self._num_before(offset) + self._given_back.get(offset, 0) + 1

    def finish(self, offset: int) -> None:
        """A message is answered; those before it may not be."""
        before = self.offset
        self._unfinished.discard(offset)
        self._given_back.pop(offset, None)
        self._answered.add(offset)
        if (first := self.offset) > before:
            self._answered = {each for each in self._answered if each >= first}
        self.is_changed = True

    def give_back(self, offset: int, *, counts: bool) -> None:
        """A message is in work no more, and comes again; ``counts``: as one that was delivered."""
        self._unfinished.discard(offset)
        self._given_back[offset] = self._given_back.get(offset, 0) + counts

    def commit(self) -> tuple[int, str]:
        """The offset and the text that say all this."""
        first = self.offset
        ends = sorted({end for end, _ in self._runs if end > first} | ({self._end} if self._end > first else set()))
        runs = [(end, self._num_before(end - 1) + (end <= self._end)) for end in ends[:_MAX_RUNS]]
        if not runs:
            return first, ""
        num_bits = min(ends[-1] - first, _MAX_BITS)
        bits = "".join("1" if first + bit in self._answered else "0" for bit in reversed(range(num_bits)))
        answered = f"{int(bits or '0', 2):x}"
        return first, json.dumps({"answered": answered, "delivered": runs}, separators=(",", ":"))

    def _num_before(self, offset: int) -> int:
        return next((count for end, count in self._runs if offset < end), 0)
