"""How many requests may be in flight, decided before any work is done.

::

    AdmissionController    of the router: admits, queues or refuses every request in O(1)
      ConcurrencyLimit     of the router, of a graph; keeps slots for higher priorities and for other clients
        AdaptiveLimit      the limit, where it follows latency
        RetrySlots         when to come back
        WaitingQueue       requests that wait for a slot
      Permit               a request that was not refused
      Refusals             errors of those that were
    InflightLimit          the plain limit of a node or step

Policy only: no gRPC, no event loop; the clock is passed in.
"""

from weft.base.adaptive_limit import AdaptiveLimit, Outcome
from weft.router.admission.concurrency_limit import LOWEST_LEVEL, ConcurrencyLimit, InflightLimit
from weft.router.admission.controller import AdmissionController, AdmissionSettings, Permit, admissible_priority

__all__ = [
    "LOWEST_LEVEL",
    "AdaptiveLimit",
    "AdmissionController",
    "AdmissionSettings",
    "ConcurrencyLimit",
    "InflightLimit",
    "Outcome",
    "Permit",
    "admissible_priority",
]
