"""Steps of a running graph, and what may go wrong with one.

A ``Step`` runs one chain of actions, made when the graph is loaded, with the wrappers alone that the plan asks for::

    Step             when -> action -> fallbacks -> soft, defaults -> error
      Limited        max_inflight -> min_remaining_ms -> timeout_ms
        Cached
          Retried
            Hedged
              Attempt          a number and a span for each call
                Limited        of a node: max_inflight
                  CallAction | StreamAction | NodeAction

A ``ShadowStep`` runs a step in the background.
"""

from weft.router.steps.action import (
    Action,
    Attempt,
    ConditionFailedError,
    Defaults,
    ErrorContext,
    Limited,
    PolicyAction,
    PolicyParts,
    StepPolicyPlan,
)
from weft.router.steps.call import CallAction, StreamAction
from weft.router.steps.node import (
    Node,
    NodeAction,
    NodeParts,
    OperatorPlan,
    PrunableNode,
    ShadowedNode,
    StreamingNode,
    across,
    reshape_slots,
)
from weft.router.steps.responses import (
    NodeResponses,
    NoResponses,
    StepStream,
    StreamParts,
    by_arrival,
    close_streams,
    of_part,
    of_response,
    responses_of,
    with_own_request,
)
from weft.router.steps.run import GraphRequest, OpenStream, Run, earlier
from weft.router.steps.step import FALLBACK_COUNTERS, SHADOW_COUNTERS, ShadowStep, Step

__all__ = [
    "FALLBACK_COUNTERS",
    "SHADOW_COUNTERS",
    "Action",
    "Attempt",
    "CallAction",
    "ConditionFailedError",
    "Defaults",
    "ErrorContext",
    "GraphRequest",
    "Limited",
    "NoResponses",
    "Node",
    "NodeAction",
    "NodeParts",
    "NodeResponses",
    "OpenStream",
    "OperatorPlan",
    "PolicyAction",
    "PolicyParts",
    "PrunableNode",
    "Run",
    "ShadowStep",
    "ShadowedNode",
    "Step",
    "StepPolicyPlan",
    "StepStream",
    "StreamAction",
    "StreamParts",
    "StreamingNode",
    "across",
    "by_arrival",
    "close_streams",
    "earlier",
    "of_part",
    "of_response",
    "reshape_slots",
    "responses_of",
    "with_own_request",
]
