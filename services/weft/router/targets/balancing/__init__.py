"""Balancing policies: how calls are spread over the replicas of a target.

Each is a rule over the router's own counts, or one of gRPC's policies, which chooses on one channel to all replicas.
"""

import random
from collections.abc import Sequence
from itertools import count
from math import ceil

from weft.router.targets.balancing.prefix import PrefixRule, read_prompt
from weft.router.targets.balancing.rule import PolicyType, ReplicaT, Rule, least_outstanding, scores, two_of

#: A replica may have so much of its fair share of the calls in flight before keys move on to the next.
MAX_SHARE = 1.25


def least_response_time(generator: random.Random) -> Rule:
    """Of two random replicas, the one with the smaller response time x (calls in flight + 1).

    A replica without measurements counts like the other one.
    """

    def pick(replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if len(replicas) == 1:
            return replicas[0]
        first, second = two_of(replicas, generator)
        first_s, second_s = first.response.mean_s, second.response.mean_s
        if first_s is None or second_s is None:
            first_s = second_s = 1.0
        is_second = second_s * (second.num_inflight + 1) < first_s * (first.num_inflight + 1)
        return second if is_second else first

    return pick


def round_robin(generator: random.Random) -> Rule:
    """The replicas take turns; the start is random, so that routers do not go round together.

    gRPC's own policy of this name silently leaves out replicas that answer badly, and for longer.
    """
    turns = count(int(generator.random() * 1024))
    return lambda replicas, key: replicas[next(turns) % len(replicas)]


def sticky(otherwise: Rule) -> Rule:
    """With a key, the first replica in the key's rendezvous order that has room; without one, ``otherwise`` decides.

    A replica has room up to ``MAX_SHARE`` times the mean of the calls in flight. When replicas come and go, only the
    keys move that must.

    Source:
        D. Thaler, C. Ravishankar, "A name-based mapping scheme for rendezvous", 1996;
        V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018.
    """

    def pick(replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if not key:
            return otherwise(replicas, key)
        limit = ceil(MAX_SHARE * (sum(replica.num_inflight for replica in replicas) + 1) / len(replicas))
        score = scores(key)
        first = min(replicas, key=score)
        if first.num_inflight < limit:
            return first
        return min((replica for replica in replicas if replica.num_inflight < limit), key=score, default=first)

    return pick


def rendezvous_first(replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
    """The replica that ``key`` prefers; the same in every process."""
    return min(replicas, key=scores(key))


#: By name; the first is the default.
POLICIES: dict[str, PolicyType] = {
    policy.name: policy
    for policy in (
        PolicyType("least_outstanding", least_outstanding),
        PolicyType("least_response_time", least_response_time),
        PolicyType("sticky", lambda generator: sticky(least_outstanding(generator)), takes_key=True),
        PolicyType("prefix", PrefixRule, read_key=read_prompt),
        PolicyType("round_robin", round_robin),
        PolicyType(
            "weighted_round_robin",  # weights come from load reports out of band, which cost no call anything
            grpc_config={
                "enableOobLoadReport": True,
                "oobReportingPeriod": "1s",
                "blackoutPeriod": "2s",
                "weightUpdatePeriod": "1s",
            },
        ),
    )
}
