"""Balancing policies: how calls are spread over the replicas of a target."""

from weft.router.targets.balancing.rule import PolicyType
from weft.router.targets.balancing.rules import (
    LEAST_OUTSTANDING,
    LEAST_RESPONSE_TIME,
    ROUND_ROBIN,
    STICKY,
    WEIGHTED_ROUND_ROBIN,
)

#: By name; the first is the default.
POLICIES: dict[str, PolicyType] = {
    policy.name: policy
    for policy in (LEAST_OUTSTANDING, LEAST_RESPONSE_TIME, STICKY, ROUND_ROBIN, WEIGHTED_ROUND_ROBIN)
}

__all__ = ["POLICIES", "PolicyType"]
