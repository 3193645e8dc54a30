"""The slots of instances for stateful sequences, and the backlog of those that wait for one."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from weft.serving.request.request import RequestSequence


class SequenceSlots:
    """Places sequences: each gets the free slot of the lowest row, or waits in the ``backlog``, in order."""

    def __init__(self, instances: Sequence[Hashable], num_slots: int) -> None:
        self._instances = list(instances)
        self._num_slots = num_slots
        self._free = [(row, index) for row in range(num_slots) for index in range(len(instances))]  # a heap
        self._lost: set[Hashable] = set()
        self._taken: dict[Hashable, dict[int, RequestSequence]] = {instance: {} for instance in instances}
        self.backlog: OrderedDict[RequestSequence, None] = OrderedDict()

    def __len__(self) -> int:
        """Sequences that have a slot or wait for one."""
        return sum(map(len, self._taken.values())) + len(self.backlog)

    @property
    def has_free(self) -> bool:
        """Whether a sequence that starts gets a slot at once."""
        return bool(self._free)

    def add(self, sequence: RequestSequence) -> list[RequestSequence]:
        """Place a sequence that starts; returns the sequences that got slots."""
        self.backlog[sequence] = None
        return self._fill()

    def remove(self, sequence: RequestSequence) -> list[RequestSequence]:
        """Remove a sequence that has ended; returns the sequences that got slots."""
        instance = sequence.instance
        if instance is None:
            del self.backlog[sequence]
            return []
        del self._taken[instance][sequence.row]
        if instance in self._lost:
            return []
        heapq.heappush(self._free, (sequence.row, self._instances.index(instance)))
        return self._fill()

    def lose(self, instance: Hashable) -> list[RequestSequence]:
        """Remove the free slots of an instance; returns the sequences in the others, which must end."""
        self._lost.add(instance)
        self._free = [slot for slot in self._free if self._instances[slot[1]] != instance]
        heapq.heapify(self._free)
        return list(self._taken[instance].values())

    def regain(self, instance: Hashable) -> list[RequestSequence]:
        """Restore the slots of an instance, if it was lost; returns the sequences that got slots."""
        if instance not in self._lost:
            return []
        self._lost.remove(instance)
        for row in range(self._num_slots):
            heapq.heappush(self._free, (row, self._instances.index(instance)))
        return self._fill()

    def placed(self) -> list[RequestSequence]:
        """Sequences that have a slot."""
        return [sequence for slots in self._taken.values() for sequence in slots.values()]

    def is_sound(self) -> bool:
        """Whether every slot is free or taken, and none is free while sequences wait; for tests."""
        num_slots = self._num_slots * (len(self._instances) - len(self._lost))
        return len(self.placed()) + len(self._free) == num_slots and not (self.backlog and self._free)

    def _fill(self) -> list[RequestSequence]:
        filled = []
        while self.backlog and self._free:
            sequence, _ = self.backlog.popitem(last=False)
            sequence.row, index = heapq.heappop(self._free)
            sequence.instance = self._instances[index]
            self._taken[sequence.instance][sequence.row] = sequence
            filled.append(sequence)
        return filled
