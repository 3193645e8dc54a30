"""Balancing policies: how calls are spread over the replicas of a target. One module each; gRPC's own share one."""

from weft.router.targets.balancing.grpc_policies import WEIGHTED_ROUND_ROBIN
from weft.router.targets.balancing.least_outstanding import LEAST_OUTSTANDING
from weft.router.targets.balancing.least_response_time import LEAST_RESPONSE_TIME
from weft.router.targets.balancing.round_robin import ROUND_ROBIN
from weft.router.targets.balancing.rule import PolicyType
from weft.router.targets.balancing.sticky import STICKY

#: By name; the first is the default.
POLICIES: dict[str, PolicyType] = {
    policy.name: policy
    for policy in (LEAST_OUTSTANDING, LEAST_RESPONSE_TIME, STICKY, ROUND_ROBIN, WEIGHTED_ROUND_ROBIN)
}

__all__ = ["POLICIES", "PolicyType"]
