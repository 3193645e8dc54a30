"""Queue policies: the orders in which a model's requests can be served, a module each."""

from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.queue import PolicyQueue

#: By the name that the parameter ``queue_policy`` of a model has; the first is the default.
QUEUES: dict[str, type[PolicyQueue]] = {
    "priority_levels": PriorityQueue,
}

__all__ = ["QUEUES", "PolicyQueue"]
