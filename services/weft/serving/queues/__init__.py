"""Queue policies: in which order the requests of a model are served. One module each."""

from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.queue import PolicyQueue

#: By the name that the parameter ``queue_policy`` of a model has; the first is the default.
QUEUES: dict[str, type[PolicyQueue]] = {
    "priority_levels": PriorityQueue,
}

__all__ = ["QUEUES", "PolicyQueue"]
