"""The idle instances of a model."""

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

from weft.serving.request.request import InferenceRequest

_InstanceT = TypeVar("_InstanceT", bound=Hashable)


class IdleInstances(deque[_InstanceT]):
    """Idle instances, the longest idle first."""

    def take(self, wanted: Hashable = None) -> _InstanceT:
        """Remove and return an instance: ``wanted``, which must be idle, or the first."""
        if wanted is None:
            return self.popleft()
        index = self.index(wanted)  # type: ignore[arg-type]  # equal to an element is enough
        instance = self[index]
        del self[index]
        return instance

    def give_back(self, instance: _InstanceT, *, is_lost: bool) -> None:
        """Return an instance that has executed; it is idle, unless it is lost."""
        if not is_lost:
            self.append(instance)

    def discard(self, instance: _InstanceT) -> None:
        """Remove an instance, if it is idle."""
        if instance in self:
            self.remove(instance)

    def check_call(self, request: InferenceRequest) -> None:
        """Check that a request that another model sent can get an instance."""

    def open(self) -> None:
        """Start to take part in the sharing of resources."""

    def close(self) -> None:
        """End to take part in the sharing of resources."""
