"""Which implementation of gRPC a process uses, and what its limits are for each."""

import argparse

import pytest

from weft.base.errors import InvalidArgumentError
from weft.v2.client.channels import is_on_weft, is_one_endpoint, open_channel
from weft.v2.client.wires import DEFAULT_WIRE, WireName, add_wire_argument, default_wire
from weft.v2.server.arguments import add_limit_arguments, given_limits, grpcio_limits
from weft.v2.server.make_server import server_options_of
from weft.v2.server.server import add_arguments


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, grpc_port=0, metrics_port=0)
    return parser.parse_args(arguments)


def test_environment_is_the_default_of_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument counts, else the variable, else the wire of this version; an empty variable is none."""
    monkeypatch.delenv("WEFT_WIRE", raising=False)
    assert (DEFAULT_WIRE, DEFAULT_WIRE) == (default_wire(), parsed().wire)
    for name in WireName:
        monkeypatch.setenv("WEFT_WIRE", name)
        assert (name, name) == (default_wire(), parsed().wire)
        assert all(other is parsed(f"--wire={other}").wire for other in WireName)
    monkeypatch.setenv("WEFT_WIRE", "")
    assert (DEFAULT_WIRE, DEFAULT_WIRE) == (default_wire(), parsed().wire)


def test_unknown_wire_is_refused_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the argument and in the variable."""
    with pytest.raises(argparse.ArgumentError, match="'quic' must be one of weft, grpcio"):
        parsed("--wire=quic")
    monkeypatch.setenv("WEFT_WIRE", "quic")
    with pytest.raises(InvalidArgumentError, match="WEFT_WIRE 'quic' must be one of weft, grpcio"):
        default_wire()
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_wire_argument(parser)
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args([])


def test_given_limits_arrive_at_a_service() -> None:
    """What a parent was given is what its services parse; what it was not given is the service's default."""
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser, has_defaults=False)
    given = [*given_limits(parser.parse_args(["--max-connections=70000000", "--keepalive-time-s=0.25"]))]
    assert ["--max-connections=70000000", "--keepalive-time-s=0.25"] == given
    limits = server_options_of(parsed(*given, "--share-ports", "--max-message-bytes=9"))
    assert (70_000_000, 0.25, 10.0, True, 9) == (
        limits.max_connections,
        limits.keepalive_time_s,
        limits.keepalive_timeout_s,
        limits.shares_ports,
        limits.max_message_bytes,
    )


def test_limits_are_options_of_grpcio() -> None:
    """Seconds become milliseconds, and a limit that is none is left out."""
    options = dict(grpcio_limits(server_options_of(parsed("--keepalive-time-s=0.25"))))
    assert (250, 16384, 16384) == (
        options["grpc.keepalive_time_ms"],
        options["grpc.max_metadata_size"],
        options["grpc.absolute_max_metadata_size"],
    )
    assert "grpc.max_connection_age_ms" not in options


@pytest.mark.parametrize(
    "argument", ["--max-concurrent-streams=0", "--max-connections=-1", "--frame-timeout-s=0", "--max-buffered-bytes=x"]
)
def test_impossible_limit_is_refused(argument: str) -> None:
    """A limit of 0 is refused where it is not "none", like a negative one and a text."""
    with pytest.raises(argparse.ArgumentError):
        parsed(argument)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:8001", True),
        ("[::1]:8001", True),
        ("localhost:8001", True),
        ("unix:/run/weft.sock", True),
        ("router:8001", False),
        ("dns:///127.0.0.1:8001", False),
        ("ipv4:127.0.0.1:8001,127.0.0.1:8002", False),
        ("xds:router", False),
    ],
)
def test_addresses_of_one_server_are_known(address: str, expected: bool) -> None:
    """A name may resolve to several; a list is several."""
    assert expected is is_one_endpoint(address)


@pytest.mark.parametrize(
    ("address", "options", "expected"),
    [
        ("127.0.0.1:8001", [], True),
        ("router.example:8001", [("grpc.max_reconnect_backoff_ms", 500)], True),
        ("[::1]:8001", [], True),
        ("unix:/run/a%20b.sock", [], True),
        ("127.0.0.1:99999", [], False),
        ("127.0.0.1", [], False),
        ("a b:1", [], False),
        ("dns:///router:8001", [], False),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", [], False),
        ("xds:router", [], False),
        ("127.0.0.1:8001", [("grpc.service_config", "{}")], False),
    ],
)
async def test_channel_is_of_the_wire_that_has_it(
    address: str, options: list[tuple[str, object]], expected: bool
) -> None:
    """Addresses and options that Weft's own wire does not have get a channel of grpcio."""
    assert expected is is_on_weft(address, options, WireName.WEFT)
    assert not is_on_weft(address, options, WireName.GRPCIO)
    if not address.startswith("xds:"):
        async with open_channel(address, options=options, wire=WireName.WEFT) as channel:
            assert type(channel).__module__.startswith("weft.wire." if expected else "grpc.")
