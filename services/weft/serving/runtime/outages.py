"""Lost instances: their backends take no batches until they are loaded again."""

from collections.abc import Hashable

from weft.base.errors import UnavailableError

#: Pauses between the attempts to load a lost backend again, in seconds; the last one repeats. The first attempt is
#: immediate, unless the backend was lost again within ``STABLE_S``.
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A backend that runs for so long counts as repaired.
STABLE_S = 30.0


class Outages:
    """Which instances are lost, and why; lives on the event loop.

    Args:
        model: Name, for messages.
        num_instances: Of the model.

    Attributes:
        reasons: By lost instance.
        is_total: Whether every instance hangs, or is lost and could not be loaded again, or not soon.
        is_loading: Whether that is so because they are still being loaded.
    """

    def __init__(self, model: str, num_instances: int) -> None:
        self._model = model
        self._num_instances = num_instances
        self.reasons: dict[Hashable, str] = {}
        self.is_total = self.is_loading = False
        self._failed: set[Hashable] = set()

    def begin(self, instance: Hashable, reason: str, *, is_hung: bool = False, is_loading: bool = False) -> None:
        """Note that the instance is lost or hangs, or that the latest attempt to load it again failed or takes long."""
        if is_hung or instance in self.reasons:
            self._failed.add(instance)
        self.is_loading = is_loading
        self.reasons[instance] = reason
        self.is_total = len(self._failed) == self._num_instances

    def end(self, instance: Hashable) -> None:
        """Note that the instance is loaded again."""
        self.reasons.pop(instance, None)
        self._failed.discard(instance)
        self.is_total = False

    def __str__(self) -> str:
        """Every reason; "" without an outage."""
        return "; ".join(self.reasons.values())

    def error(self) -> UnavailableError:
        """Error for a request while no instance is left."""
        return UnavailableError(f"no instance of model '{self._model}' runs: {self}; it is tried again and again")
