"""How many requests may be in flight, decided before any work is done.

::

    Admission controller             of the router: every request passes it, and is let in or refused in O(1)
      Limit           a limit, of the router or of a graph, with places kept for higher priorities and for other clients
        AdaptiveLimit    the limit, where it follows latency
        RetrySlots       when to come back
    Admission        the plain limit of a node or step

Policy only: no gRPC, no event loop; the clock is passed in.
"""

from weft_router.admission.adaptive import AdaptiveLimit, Outcome
from weft_router.admission.concurrency_limit import ConcurrencyLimit
from weft_router.admission.controller import AdmissionController, AdmissionSettings
from weft_router.admission.inflight_limit import InflightLimit

__all__ = ["AdaptiveLimit", "AdmissionController", "AdmissionSettings", "ConcurrencyLimit", "InflightLimit", "Outcome"]
