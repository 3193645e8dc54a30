"""The instances of a model whose backends are lost: they take no batches until they are loaded again."""

from collections.abc import Hashable

from weft_common.errors import UnavailableError

#: Pauses between the attempts to load a lost backend again, in seconds; the last one repeats. The first attempt is made
#: at once, unless the backend was lost again within ``STABLE_S``.
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A backend that ran so long without being lost is taken for mended.
STABLE_S = 30.0


class Outages:
    """Which instances are lost, and why; lives on the event loop.

    Args:
        model: Name, for messages.
        num_instances: Of the model.
    """

    def __init__(self, model: str, num_instances: int) -> None:
        self._model = model
        self._num_instances = num_instances
        self._reasons: dict[Hashable, str] = {}
        self._failed: set[Hashable] = set()

    def __contains__(self, instance: Hashable) -> bool:
        return instance in self._reasons

    @property
    def is_total(self) -> bool:
        """Whether every instance hangs, or is lost and could not be loaded again."""
        return len(self._failed) == self._num_instances

    def begin(self, instance: Hashable, reason: str, *, is_hung: bool = False) -> None:
        """The instance is lost; or, if it was, the latest attempt to load it again failed, or it hangs."""
        if is_hung or instance in self._reasons:
            self._failed.add(instance)
        self._reasons[instance] = reason

    def end(self, instance: Hashable) -> None:
        """The instance is loaded again."""
        self._reasons.pop(instance, None)
        self._failed.discard(instance)

    def __str__(self) -> str:
        """Every reason; "" without outage."""
        return "; ".join(self._reasons.values())

    def error(self) -> UnavailableError:
        """What a request is told when no instance is left."""
        return UnavailableError(f"no instance of model '{self._model}' runs: {self}; it is tried again and again")
