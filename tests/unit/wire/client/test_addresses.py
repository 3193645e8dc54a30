"""Addresses of channels."""

import pytest

from weft.wire.client.dialling import parse_address


@pytest.mark.parametrize(
    ("address", "host", "port", "authority"),
    [
        ("localhost:80", "localhost", 80, "localhost:80"),
        ("127.0.0.1:8001", "127.0.0.1", 8001, "127.0.0.1:8001"),
        ("[::1]:5", "::1", 5, "[::1]:5"),
        ("[::1]", "::1", 443, "[::1]:443"),
        ("::1", "::1", 443, "[::1]:443"),
        ("name", "name", 443, "name:443"),
        ("dns:name:1", "name", 1, "name:1"),
        ("dns:///name:1", "name", 1, "name:1"),
        ("dns://8.8.8.8/name:1", "name", 1, "name:1"),
        ("ipv4:1.2.3.4:5", "1.2.3.4", 5, "1.2.3.4:5"),
        ("ipv6:%5B::1%5D:5", "::1", 5, "[::1]:5"),
    ],
)
def test_a_host_and_a_port(address: str, host: str, port: int, authority: str) -> None:
    """A host may come with a scheme, in brackets, percent-encoded after a scheme, and without a port."""
    found = parse_address(address)
    assert (found.host, found.port, found.path, found.authority) == (host, port, "", authority)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:/run/a", "/run/a"),
        ("unix:///run/a", "/run/a"),
        ("unix:a/b", "a/b"),
        ("unix:/run/a%20b", "/run/a b"),
        ("unix-abstract:weft", "\0weft"),
        ("unix-abstract:a%2Fb", "\0a/b"),
    ],
)
def test_a_unix_socket(address: str, path: str) -> None:
    """A Unix socket has a path, absolute or not, or a name in the abstract namespace; calls to it are for localhost."""
    found = parse_address(address)
    assert (found.host, found.port, found.path, found.authority) == ("", 0, path, "localhost")


@pytest.mark.parametrize(
    "address",
    ["", ":80", "host:", "host:x", "host:65536", "host:-1", "unix:", "unix://host/path", "unix-abstract:",
     "unix:a%00b", "[::1", "[::1]5", "a b:1", "user@host:1", "dns:///", "http://host:80"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    """Everything else is refused with a message that quotes it."""
    with pytest.raises(ValueError, match="address") as refused:
        parse_address(address)
    assert repr(address) in str(refused.value)
