"""Which replica a sequence lives on: its state is there and nowhere else."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

#: So many sequences are remembered; the one whose last request is longest ago is forgotten first.
MAX_PINS = 100_000
#: A sequence without requests for so long has ended, in seconds.
MAX_IDLE_S = 3_600.0


class Pins:
    """Sequences and the addresses of their replicas.

    Args:
        clock_ns: Monotonic.
        max_pins: Most that are remembered.
        max_idle_s: As ``MAX_IDLE_S``.
    """

    def __init__(
        self, clock_ns: Callable[[], int], *, max_pins: int = MAX_PINS, max_idle_s: float = MAX_IDLE_S
    ) -> None:
        self._clock_ns = clock_ns
        self._max_pins = max_pins
        self._max_idle_ns = int(max_idle_s * 1e9)
        #: Address and time of the last request; the longest idle first.
        self._pins: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        self._num_at: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many sequences are remembered."""
        return len(self._pins)

    def set(self, sequence: Hashable, address: str) -> None:
        """The sequence lives at ``address`` and has a request now."""
        now_ns = self._clock_ns()
        self.forget(sequence)
        self._pins[sequence] = address, now_ns
        self._num_at[address] += 1
        while True:
            oldest, (_, at_ns) = next(iter(self._pins.items()))
            if len(self._pins) <= self._max_pins and now_ns - at_ns < self._max_idle_ns:
                return
            self.forget(oldest)

    def get(self, sequence: Hashable) -> str | None:
        """The address where the sequence lives; None where it is not known."""
        pin = self._pins.get(sequence)
        if pin is None or self._clock_ns() - pin[1] >= self._max_idle_ns:
            return None
        return pin[0]

    def forget(self, sequence: Hashable) -> None:
        """The sequence is over."""
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            address = pin[0]
            self._num_at[address] -= 1
            if not self._num_at[address]:
                del self._num_at[address]

    def has(self, address: str) -> bool:
        """Whether a sequence lives at ``address``."""
        return address in self._num_at
