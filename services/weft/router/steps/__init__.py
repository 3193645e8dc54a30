"""Steps of a running graph, and what may go wrong with one.

A ``Step`` runs an ``Action``: the call of a model, or a node. Policies are actions around it, put there when the graph
is loaded and only where the plan has them, in this order::

    GuardedStep      when -> max_inflight -> min_remaining_ms -> ... -> fallback -> soft and defaults -> error
      Cached
        Retried
          Hedged
            Attempt  a number and a span for each call
              CallAction | StreamAction | NodeAction | StreamNodeAction

A step without any of this is a plain ``Step`` over its action. A ``ShadowStep`` runs in the background.
"""

from weft.router.steps.base import Action, ConditionFailedError, ErrorContext, Node, PolicyAction, PrunableNode
from weft.router.steps.call import CallAction
from weft.router.steps.guarded import GuardedStep
from weft.router.steps.merging import by_arrival
from weft.router.steps.node import NodeAction
from weft.router.steps.node_stream import StreamNodeAction
from weft.router.steps.parts import NodeParts, OperatorPlan, PolicyParts, StepPolicyPlan
from weft.router.steps.responses import (
    NodeResponses,
    NoResponses,
    OpenStream,
    close_streams,
    of_response,
    responses_of,
    with_own_request,
)
from weft.router.steps.run import GraphRequest, Run, earlier
from weft.router.steps.shadow import ShadowedNode, ShadowStep
from weft.router.steps.step import Step
from weft.router.steps.step_stream import StepStream, StreamParts
from weft.router.steps.stream import StreamAction

__all__ = [
    "Action",
    "CallAction",
    "ConditionFailedError",
    "ErrorContext",
    "GraphRequest",
    "GuardedStep",
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
    "StreamNodeAction",
    "StreamParts",
    "by_arrival",
    "close_streams",
    "earlier",
    "of_response",
    "responses_of",
    "with_own_request",
]
