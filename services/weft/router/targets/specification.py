"""Command-line form of targets: addresses, balancing policies, TLS and keys."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add
from weft.router.targets.balancing import POLICIES
from weft.router.targets.balancing.rule import PolicyType
from weft.v2.security.channel import ChannelSecurity
from weft.v2.security.tls import TlsFiles

if TYPE_CHECKING:
    from weft.base.core import CallContext, InferCall

#: Where a call's key may stand.
_KEY_KINDS = ("parameter", "header")
#: Whose health gRPC asks for.
_SERVICE = "inference.GRPCInferenceService"
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
#: Option, what it takes, and its help; each may be given once for all targets and once for each.
_OPTIONS = (
    ("--target-tls-ca", "FILE", "call targets over TLS; this CA issued their certificates"),
    ("--target-tls-cert", "FILE", "certificate to show to targets that ask for one"),
    ("--target-tls-key", "FILE", "private key of that certificate"),
    ("--target-tls-name", "NAME", "name in the certificate of targets (default: the host called)"),
    ("--target-key-file", "FILE", "key to send to targets: the first line of this file"),
)

_ALL = ""


class BalancingPolicy(NamedTuple):
    """Balancing policy of one target.

    Attributes:
        name: In ``POLICIES``.
        key_kind, key_name: Calls with the same value of this parameter or header stay together; "": only those of a
            sequence do.
    """

    name: str = next(iter(POLICIES))
    key_kind: str = ""
    key_name: str = ""

    @property
    def text(self) -> str:
        """The form that ``parse_policy`` takes."""
        return f"{self.name}:{self.key_kind}={self.key_name}" if self.key_kind else self.name

    @property
    def type(self) -> PolicyType:
        """The policy's type."""
        return POLICIES[self.name]

    @property
    def is_by_grpc(self) -> bool:
        """Whether gRPC chooses, on one channel to all replicas."""
        return self.type.make_rule is None

    def key_of(self, call: "InferCall", context: "CallContext") -> object:
        """Key of a call; "" if it has none."""
        if self.type.read_key is not None:
            return self.type.read_key(call)
        if not self.key_kind:
            return ""
        if self.key_kind == "header":
            return context.headers.get(self.key_name, "")
        return str(call.parameters.get(self.key_name, ""))


def policy_names() -> str:
    """All policies, for messages, the default first."""
    keyed = (f"{name}:{kind}=NAME" for name, policy in POLICIES.items() if policy.takes_key for kind in _KEY_KINDS)
    return ", ".join((*POLICIES, *keyed))


def parse_policy(text: str) -> BalancingPolicy:
    """Parse a policy. Raises ValueError."""
    name, colon, key = text.partition(":")
    kind, _, key_name = key.partition("=")
    found = POLICIES.get(name)
    if found is None or (colon and not (found.takes_key and kind in _KEY_KINDS and key_name)):
        raise ValueError(f"'{text}' is no policy; it must be one of {policy_names()}")
    return BalancingPolicy(name, kind, key_name.lower() if kind == "header" else key_name)


def parse_target(text: str) -> tuple[str, str]:
    """Parse ``NAME=ADDRESS`` into name and address. Raises ValueError."""
    name, separator, address = text.partition("=")
    if not (name and separator and address):
        raise ValueError(f"'{text}' must be NAME=ADDRESS, for example model=127.0.0.1:8021")
    parts = address.split(",")
    is_list = len(parts) > 1 and not address.startswith(_SCHEMES)
    if not all(_is_host_and_port(part) or (not is_list and address.startswith(_SCHEMES)) for part in parts):
        raise ValueError(
            f"address '{address}' of '{name}' must be HOST:PORT, several of these with commas between them, or a name "
            f"that gRPC resolves, which starts with {', '.join(_SCHEMES)}"
        )
    if len(set(parts)) != len(parts):
        raise ValueError(f"address '{address}' of '{name}' has the same replica twice")
    return name, address


def policy_fault(address: str, policy: BalancingPolicy) -> str:
    """Return why calls to ``address`` cannot use ``policy``, "" if they can."""
    if address.startswith("xds:"):
        return f"the control plane of '{address}' says how calls are spread; leave the policy out"
    if dns_name(address) or not address.startswith(_SCHEMES):
        parts = address.split(",")
        if policy.is_by_grpc and len({part.startswith("[") for part in parts}) > 1:
            return (
                f"{policy.name} is gRPC's own, which takes IPv4 or IPv6 addresses, not of both kinds, got '{address}'"
            )
        if policy.is_by_grpc and "," in address and not all(_is_ip(part) for part in parts):
            return f"{policy.name} is gRPC's own, which takes IP addresses or one dns:///NAME:PORT, got '{address}'"
        return ""
    return f"'{address}' is one address for gRPC; give HOST:PORT, a list of these, or dns:///NAME:PORT"


def dns_name(address: str) -> str:
    """The ``host:port`` that the router resolves itself; "" for other addresses."""
    rest = address.removeprefix("dns:")
    if rest == address:
        return ""
    if rest.startswith("//"):
        authority, _, rest = rest[2:].partition("/")
        if authority:
            return ""
    return rest if _is_host_and_port(rest) else ""


def channel_address(address: str) -> str:
    """The name of all replicas for one channel of gRPC."""
    if "," not in address:
        return address
    return f"{'ipv6' if address.startswith('[') else 'ipv4'}:{address}"


def channel_options(policy: BalancingPolicy) -> list[tuple[str, str]]:
    """Options of a channel on which gRPC spreads the calls over healthy replicas that are no outliers."""
    outliers = {
        "interval": "1s",
        "baseEjectionTime": "1s",
        "maxEjectionPercent": 50,
        "successRateEjection": {},
        "failurePercentageEjection": {"threshold": 60, "minimumHosts": 2, "requestVolume": 10},
        "childPolicy": [{policy.name: policy.type.grpc_config}],
    }
    config = {
        "loadBalancingConfig": [{"outlier_detection_experimental": outliers}],
        "healthCheckConfig": {"serviceName": _SERVICE},
    }
    return [("grpc.service_config", json.dumps(config))]


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and 0 < int(port) < 65536  # gRPC takes port 65537 for 1, none for 443
    return bool(host) and is_port and "/" not in host


def _is_ip(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host.startswith("[") or host.replace(".", "").isdecimal()


def add_target_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for TLS and keys of targets."""
    group = parser.add_argument_group(
        "security of targets", "each for all targets, or as TARGET=VALUE for one; may be repeated"
    )
    for option, metavar, text in _OPTIONS:
        add(group, f"{option} [TARGET=]{metavar} ...", text, _for_target)


def target_securities(options: argparse.Namespace) -> dict[str, ChannelSecurity]:
    """Security settings by target, for targets that use TLS or a key.

    Raises InvalidArgumentError for an unknown target, an option given twice, or a missing or invalid file.
    """
    names = [name for name, _ in options.target]
    given = {
        option: _by_target(option, getattr(options, option.removeprefix("--").replace("-", "_")), names)
        for option, *_ in _OPTIONS
    }
    securities: dict[str, ChannelSecurity] = {}
    for name in names:
        ca, cert, key, server_name, key_file = (values.get(name, values.get(_ALL, "")) for values in given.values())
        files = TlsFiles(*(Path(text) if text else None for text in (cert, key, ca)))
        security = ChannelSecurity(files, server_name, Path(key_file) if key_file else None)
        try:
            security.check()
        except InvalidArgumentError as error:
            raise error.with_message(f"target '{name}': {error.message}") from None
        if not security.is_plain:
            securities[name] = security
    return securities


def _for_target(text: str) -> tuple[str, str]:
    """Split ``TARGET=VALUE``; a path with a folder before its "=" is a value for all targets."""
    name, separator, value = text.partition("=")
    return (name, value) if separator and "/" not in name else (_ALL, text)


def _by_target(option: str, pairs: Iterable[tuple[str, str]], names: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in pairs:
        if name and name not in names:
            raise InvalidArgumentError(f"{option} {name}={value}: there is no target '{name}', only {', '.join(names)}")
        if name in values:
            raise InvalidArgumentError(f"{option} is given twice for {f'target {name!r}' if name else 'all targets'}")
        values[name] = value
    return values
