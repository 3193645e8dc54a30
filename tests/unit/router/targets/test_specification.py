"""Targets and policies as they are written on the command line."""

import json

import pytest

from weft.router.targets.specification import (
    BalancingPolicy,
    channel_address,
    channel_options,
    dns_name,
    parse_policy,
    parse_target,
    policy_fault,
)


@pytest.mark.parametrize(
    "text",
    [
        "model=h:1",
        "model=h1:1,h2:1",
        "model=[::1]:1,[::1]:2",
        "m=dns:///h:1",
        "m=xds:///s",
        "m=unix:/a,b",
        "m=ipv4:1.2.3.4:1,1.2.3.5:1",
    ],
)
def test_what_is_a_target(text: str) -> None:
    """One address, several, or a name that gRPC resolves."""
    assert tuple(text.split("=", 1)) == parse_target(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model", "must be NAME=ADDRESS"),
        ("=h:1", "must be NAME=ADDRESS"),
        ("model=h", "must be HOST:PORT"),
        ("model=h1:1,h2", "must be HOST:PORT"),
        ("model=h1:1,", "must be HOST:PORT"),
        ("model=h1:1,dns:///h:1", "must be HOST:PORT"),
        ("model=http://h:1", "must be HOST:PORT"),
        ("model=h:65536", "must be HOST:PORT"),
        ("model=h1:1,h2:1,h1:1", "twice"),
    ],
)
def test_what_is_no_target(text: str, fault: str) -> None:
    """The message says what it must be."""
    with pytest.raises(ValueError, match=fault):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("least_outstanding", BalancingPolicy("least_outstanding")),
        ("weighted_round_robin", BalancingPolicy("weighted_round_robin")),
        ("sticky", BalancingPolicy("sticky")),
        ("sticky:parameter=User", BalancingPolicy("sticky", "parameter", "User")),
        ("sticky:header=X-User", BalancingPolicy("sticky", "header", "x-user")),
    ],
)
def test_what_is_a_policy(text: str, expected: BalancingPolicy) -> None:
    """Header names are lower-case, as gRPC has them; what is parsed can be written again."""
    assert expected == parse_policy(text)
    assert expected == parse_policy(expected.text)


@pytest.mark.parametrize("text", ["", "random", "sticky:", "sticky:cookie=a", "sticky:header=", "round_robin:header=a"])
def test_what_is_no_policy(text: str) -> None:
    """The message has all that there are."""
    with pytest.raises(ValueError, match="least_outstanding, least_response_time, sticky, round_robin, weighted"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("address", "policy", "fault"),
    [
        ("h1:1,h2:1", "sticky", ""),
        ("h1:1,h2:1", "weighted_round_robin", "takes IP addresses"),
        ("10.0.0.1:1,10.0.0.2:1", "weighted_round_robin", ""),
        ("[::1]:1,[::1]:2", "weighted_round_robin", ""),
        ("h1:1,h2:1", "round_robin", ""),
        ("[::1]:1,10.0.0.2:1", "weighted_round_robin", "not of both kinds"),
        ("dns:///h:1", "round_robin", ""),
        ("dns:h:1", "sticky", ""),
        ("xds:///s", "round_robin", "control plane"),
        ("unix:/s", "sticky", "one address"),
        ("dns://1.1.1.1/h:1", "sticky", "one address"),
    ],
)
def test_which_policies_fit_which_addresses(address: str, policy: str, fault: str) -> None:
    """What does not fit is refused with the reason."""
    found = policy_fault(address, parse_policy(policy))
    assert (bool(fault), True) == (bool(found), fault in found)


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
