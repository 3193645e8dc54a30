"""Stop strings of a stream."""

from collections.abc import Sequence

from weft.base.errors import InvalidArgumentError


class StopStrings:
    """Lets text pass up to the first stop string, which is not part of it.

    The first is the one that ends first, as if the text came character by character; of those that end together, the
    longest. So the answer does not depend on how the text is cut into pieces. Text that may be the beginning of a stop
    string is kept back.

    Args:
        stop: The strings; none lets everything pass.

    Attributes:
        stopped_by: The stop string that was met; None as long as none was.

    Raises:
        InvalidArgumentError: One of them is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidArgumentError("a stop string must have at least one character, got ''")
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._kept = ""

    @property
    def max_kept_chars(self) -> int:
        """So many characters of the text may be kept back; what comes depends on no earlier ones."""
        return max(self._longest - 1, 0)

    def push(self, text: str) -> str:
        """Text that comes before any stop string."""
        if self.stopped_by is not None:
            return ""
        if not self._stop:
            return text
        text = self._kept + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            self._kept = ""
            return text[:start]
        num_kept = self._num_kept(text)
        self._kept = text[len(text) - num_kept :]
        return text[: len(text) - num_kept]

    def finish(self) -> str:
        """The text that was kept back; nothing follows."""
        kept, self._kept = self._kept, ""
        return kept

    def _num_kept(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        for length in range(min(self.max_kept_chars, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
