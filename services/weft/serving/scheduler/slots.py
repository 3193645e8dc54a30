"""Which requests enter a backend that works on several at once, each for as long as it takes: policy only."""

from collections.abc import Hashable, Iterable
from itertools import islice

from weft.serving.queues.queue import RequestQueue, Waiting
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import BatchDecision

#: Requests that one instance gets at once, so that a long run of them cannot hold up a better one.
_MAX_AT_ONCE = 16


class SlotBatcher:
    """Hands out the head of the queue while its instance has a slot for it.

    A request has its slot from when it is handed out until it is answered. Another may enter an instance while fewer
    than ``num_slots`` of the requests there are at least as good as it. So one that is strictly better
    (``RequestQueue.overtakes``) enters a full instance at once, where the backend may put others aside for it, and an
    instance never has more than ``num_slots`` requests of one level.

    Args:
        queue: Of the model.
        num_slots: Of each instance.
        idle: Instances that can take requests now.
    """

    def __init__(self, queue: RequestQueue, num_slots: int, idle: Iterable[Hashable]) -> None:
        self._num_slots = num_slots
        self._overtakes = queue.overtakes
        self._idle = idle
        self._members: dict[Hashable, set[InferenceRequest]] = {}
        self._instance_of: dict[InferenceRequest, Hashable] = {}

    def __len__(self) -> int:
        """Slots that are taken."""
        return len(self._instance_of)

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        """Requests to hand to the idle instance that has fewest; none where none may enter."""
        instance = min(self._idle, key=self._num_members, default=None)
        if instance is None:
            return BatchDecision([])
        entering: list[InferenceRequest] = []
        # One at a time where there are several instances, so that they share what came together.
        for request in islice(queue, _MAX_AT_ONCE if len(self._members) < 2 else 1):
            if not self._may_enter(request, instance, len(entering)):
                break
            entering.append(request)
        return BatchDecision(entering, instance=instance)

    def enter(self, requests: Iterable[InferenceRequest], instance: Hashable) -> None:
        """The requests take slots of the instance."""
        members = self._members.setdefault(instance, set())
        for request in requests:
            members.add(request)
            self._instance_of[request] = instance

    def leave(self, request: InferenceRequest) -> bool:
        """Free the slot of a request; returns whether it had one."""
        instance = self._instance_of.pop(request, None)
        if instance is None:
            return False
        self._members[instance].discard(request)
        return True

    def _num_members(self, instance: Hashable) -> int:
        return len(self._members.setdefault(instance, set()))

    def _may_enter(self, request: InferenceRequest, instance: Hashable, num_entering: int) -> bool:
        members = self._members[instance]
        num_left = self._num_slots - num_entering  # those that enter with it come first in the order of service
        if len(members) < num_left:
            return True
        return num_left > sum(not self._overtakes(request, other) for other in members)
