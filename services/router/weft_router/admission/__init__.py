"""How many requests may be in flight, decided before any work is done.

::

    Door             of the router: every request passes it, and is let in or refused in O(1)
      Gate           a limit, of the router or of a graph, with places kept for higher priorities and for other clients
        AdaptiveLimit    the limit, where it follows latency
        RetrySlots       when to come back
    Admission        the plain limit of a node or step

Policy only: no gRPC, no event loop; the clock is passed in.
"""

from weft_router.admission.adaptive import AdaptiveLimit, Outcome
from weft_router.admission.door import Door, DoorSettings
from weft_router.admission.gate import Gate
from weft_router.admission.inflight import Admission

__all__ = ["AdaptiveLimit", "Admission", "Door", "DoorSettings", "Gate", "Outcome"]
