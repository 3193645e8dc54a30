"""The instances of a model that have nothing to do."""

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

from weft_serving.request.request import InferenceRequest

_InstanceT = TypeVar("_InstanceT", bound=Hashable)


class IdleInstances(deque[_InstanceT]):
    """Who has been idle for longest comes first."""

    def take(self, wanted: Hashable = None) -> _InstanceT:
        """An instance, which is idle no longer: ``wanted``, which must be one of them, or any."""
        if wanted is None:
            return self.popleft()
        index = self.index(wanted)  # type: ignore[arg-type]  # equal to an element is enough
        instance = self[index]
        del self[index]
        return instance

    def give_back(self, instance: _InstanceT, *, is_lost: bool) -> None:
        """An instance that was taken has executed; it is idle, unless it is lost."""
        if not is_lost:
            self.append(instance)

    def discard(self, instance: _InstanceT) -> None:
        """The instance is not idle, if it was."""
        if instance in self:
            self.remove(instance)

    def check_call(self, request: InferenceRequest) -> None:
        """Return if a request that another model sent may get an instance."""

    def open(self) -> None:
        """Instances will be taken."""

    def close(self) -> None:
        """Nothing is taken any more."""
