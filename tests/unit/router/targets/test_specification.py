"""Targets and policies as they are written on the command line."""

import json
from pathlib import Path

from tests.case_files import Case, cases

from weft.router.targets.specification import (
    BalancingPolicy,
    channel_address,
    channel_options,
    dns_name,
    parse_policy,
    parse_target,
    policy_fault,
)


@cases(Path(__file__).with_name("specification.txt"))
def test_what_is_written_on_the_command_line(case: Case) -> None:
    """Targets, policies, which can be written as they were read, and which of them fit; or what they must be."""
    kind, *words = case.title.split()
    try:
        if kind == "target":
            found = " ".join(parse_target(words[0]))
        elif kind == "policy":
            policy = parse_policy(words[0].strip("'"))
            assert policy == parse_policy(policy.text)
            found = policy.text
        else:
            found = policy_fault(words[0], parse_policy(words[1])) or "fits"
    except ValueError as error:
        found = str(error)
    case.check(found)


def test_the_names_that_the_router_resolves_itself() -> None:
    """With an authority only gRPC can."""
    names = ["dns:///h:1", "dns:h:1", "dns://1.1.1.1/h:1", "h:1", "xds:///h:1", "dns:///h"]
    assert ["h:1", "h:1", "", "", "", ""] == [dns_name(name) for name in names]


def test_the_channel_of_a_list_has_all_addresses() -> None:
    """In gRPC's own spelling."""
    given = ("h:1", "10.0.0.1:1,10.0.0.2:1", "[::1]:1,[::1]:2", "dns:///h:1")
    expected = ["h:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1,[::1]:2", "dns:///h:1"]
    assert expected == list(map(channel_address, given))


def test_the_service_config_asks_for_health_and_outlier_detection() -> None:
    """Around the policy itself."""
    ((name, text),) = channel_options(BalancingPolicy("weighted_round_robin"))
    config = json.loads(text)
    (balancing,) = config["loadBalancingConfig"]
    (child,) = balancing["outlier_detection_experimental"]["childPolicy"]
    assert ("grpc.service_config", "inference.GRPCInferenceService") == (
        name,
        config["healthCheckConfig"]["serviceName"],
    )
    assert child["weighted_round_robin"]["enableOobLoadReport"] is True
