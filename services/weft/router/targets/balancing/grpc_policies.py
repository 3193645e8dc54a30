"""Policies of gRPC itself, which chooses on one channel to all replicas."""

from weft.router.targets.balancing.rule import PolicyType

#: Weights come from load reports out of band, which cost no call anything.
WEIGHTED_ROUND_ROBIN = PolicyType(
    "weighted_round_robin",
    grpc_config={
        "enableOobLoadReport": True,
        "oobReportingPeriod": "1s",
        "blackoutPeriod": "2s",
        "weightUpdatePeriod": "1s",
    },
)
