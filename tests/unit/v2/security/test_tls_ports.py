"""TLS as clients of both ports see it; every certificate is made for the test."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.certificates import Authority
from tests.unit.v2.builders import code, make_request

from weft.base.errors import InvalidArgumentError
from weft.v2 import healthcheck
from weft.v2.client.channels import open_channel
from weft.v2.security.channel import ChannelSecurity, is_local
from weft.v2.security.tls import ServerTls, TlsFiles
from weft.v2.server import metrics
from weft.v2.server.listening import exposure
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


def trusting(authority, pair=None, name=""):
    return ChannelSecurity(TlsFiles(*(pair or (None, None)), authority.ca), name)  # type: ignore[call-arg]


async def status(address, security=None, timeout_s=5):
    """What a health check over a new connection ends with."""
    async with open_channel(address, security=security) as channel:
        return await code(HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s))


def num_connections(address):
    """Connections that are open to a port of this machine, as the kernel counts them at the server's end."""
    local = f":{int(address.rpartition(':')[2]):04X}"
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(fields[1].endswith(local) and fields[3] == "01" for fields in lines)


def scrape(address, context):
    with urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=10) as answer:
        return answer.read().decode()


def http_context(authority, pair=None):
    context = ssl.create_default_context(cafile=authority.ca)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


async def test_who_connects(listen, authority, tmp_path):
    """Clients that trust the certificate's CA and name; with a client CA, those that show a certificate of it."""
    pair, client = authority.issue("service"), authority.issue("client")
    other = Authority(tmp_path, "other")
    arguments = ["--tls-cert", pair.cert, "--tls-key", pair.key]
    ports = await listen(*arguments)
    for security, expected in (
        (trusting(authority), "OK"),
        (trusting(authority, name="service"), "OK"),  # in the place of the address
        (trusting(authority, name="another"), "UNAVAILABLE"),
        (trusting(other), "UNAVAILABLE"),
        (None, "UNAVAILABLE"),
    ):
        assert expected == await status(ports.grpc, security)
    ports = await listen(*arguments, "--tls-client-ca", authority.ca)
    for shown, expected in ((client, "OK"), (other.issue("stranger"), "UNAVAILABLE"), (None, "UNAVAILABLE")):
        assert expected == await status(ports.grpc, trusting(authority, shown))


@pytest.mark.parametrize("protocols", [["http/1.1"], []])
async def test_grpc_port_speaks_http2_alone(listen, authority, protocols):
    """A TLS client that does not offer h2 is shown out, by the handshake or right after it, before it gets anything."""
    pair = authority.issue("service")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key)
    host, _, port = ports.grpc.rpartition(":")
    context = http_context(authority)
    if protocols:
        context.set_alpn_protocols(protocols)

    def received():
        with (
            contextlib.suppress(ssl.SSLError, ConnectionError),
            socket.create_connection((host, port), 10) as plain,
            context.wrap_socket(plain, server_hostname="service") as secured,
        ):
            return secured.recv(1)
        return b""

    assert b"" == await asyncio.to_thread(received)


async def test_health_check_of_images_speaks_tls(listen, authority, capsys):
    """The command of container images is 0 with the CA, and with a client certificate where one is asked for."""
    pair, client = authority.issue("service"), authority.issue("client")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca)
    secured = ["--tls-ca", authority.ca, "--tls-cert", client.cert, "--tls-key", client.key]
    for arguments, status in ((secured, 0), (secured[:2], 1), ([], 1), (secured[2:4], 2), (["--tls-ca", "/none"], 2)):
        assert status == await asyncio.to_thread(healthcheck.main, [ports.grpc, *map(str, arguments)])
    assert "/none" in capsys.readouterr().err


async def test_client_certificate_is_asked_for_on_the_metrics_port_too(listen, authority, tmp_path):
    """It is closed to who shows no certificate, or one of another CA."""
    pair, client = authority.issue("service"), authority.issue("client")
    stranger = Authority(tmp_path, "strangers").issue("stranger")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca)
    assert "process_open_fds" in await asyncio.to_thread(scrape, ports.metrics, http_context(authority, client))
    for wrong in (None, stranger):
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(scrape, ports.metrics, http_context(authority, wrong))


async def test_expired_certificate_is_refused(listen, authority):
    """A certificate serves until its time is over; from then on new connections of either side are refused."""
    connections = []
    for number, (server_s, client_s) in enumerate(((2.0, 3600), (3600, 2.0))):
        pair = authority.issue(f"service{number}", valid_s=server_s)
        client = authority.issue(f"client{number}", valid_s=client_s)
        ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca)
        connections.append((ports.grpc, trusting(authority, client)))
        assert "OK" == await status(*connections[-1])
    end_s = time.monotonic() + 15
    for address, security in connections:
        while "OK" == await status(address, security):
            assert time.monotonic() < end_s, "an expired certificate still serves"
            await asyncio.sleep(0.05)
        assert "UNAVAILABLE" == await status(address, security)


async def test_new_certificate_serves_without_restart(listen, authority):
    """Both ports show the new certificate at the next handshake; a connection that was there lives on."""
    pair = authority.issue("first")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key)
    async with open_channel(ports.grpc, security=trusting(authority, name="first")) as channel:
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        authority.issue("second", into="first")
        assert "OK" == await status(ports.grpc, trusting(authority, name="second"))
        assert "UNAVAILABLE" == await status(ports.grpc, trusting(authority, name="first"))
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    host, _, port = ports.metrics.rpartition(":")

    def shown():
        with (
            socket.create_connection((host, port), 10) as plain,
            http_context(authority).wrap_socket(plain, server_hostname="second") as secured,
        ):
            return dict(entry[0] for entry in secured.getpeercert()["subject"])

    assert {"commonName": "second"} == await asyncio.to_thread(shown)


async def test_new_client_ca_counts_on_both_ports(listen, authority, tmp_path):
    """A client CA that is replaced shuts out the clients of the old one and lets in those of the new one."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair, of_old, of_new = authority.issue("service"), old.issue("of_old"), new.issue("of_new")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(old.ca.read_bytes())
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", clients)
    assert "UNAVAILABLE" == await status(ports.grpc, trusting(authority, of_new))
    (tmp_path / "draft").write_bytes(new.ca.read_bytes())
    os.replace(tmp_path / "draft", clients)
    assert "OK" == await status(ports.grpc, trusting(authority, of_new))
    assert "UNAVAILABLE" == await status(ports.grpc, trusting(authority, of_old))
    await asyncio.to_thread(scrape, ports.metrics, http_context(authority, of_new))
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(scrape, ports.metrics, http_context(authority, of_old))


@pytest.mark.parametrize("wrong", ["junk", "other key", "gone"])
async def test_bad_new_certificate_keeps_the_old_one(listen, authority, tmp_path, caplog, wrong):
    """A file that is no certificate, fits no key or is gone changes nothing, and the log says so."""
    pair = authority.issue("service")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key)
    if wrong == "junk":
        pair.cert.write_text("no certificate")
    elif wrong == "other key":
        os.replace(authority.issue("another").key, pair.key)
    else:
        pair.cert.unlink()
    for _ in range(2):
        assert "OK" == await status(ports.grpc, trusting(authority, name="service"))
    complaints = [record for record in caplog.records if "the old ones stay in force" in record.getMessage()]
    assert 1 == len(complaints)
    assert str(pair.cert) in complaints[0].getMessage()
    authority.issue("second", into="service")
    assert "OK" == await status(ports.grpc, trusting(authority, name="second"))


async def test_client_takes_over_its_new_certificate(listen, authority, tmp_path, core):
    """A channel shows the certificate in its file; calls in flight end on the old connection, which then goes."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair, client = authority.issue("service"), old.issue("client")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(old.ca.read_bytes())
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", clients)
    async with open_channel(ports.grpc, security=trusting(authority, client)) as channel:
        stub = GRPCInferenceServiceStub(channel)
        hanging = stub.ModelInfer(make_request("hang"), timeout=20)
        await core.started.wait()
        watching = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        await watching.read()
        clients.write_bytes(new.ca.read_bytes())
        replacement = new.issue("replacement")
        os.replace(replacement.key, client.key)
        os.replace(replacement.cert, client.cert)
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert not hanging.done()
        core.release.set()
        await hanging
        assert not watching.done()
        assert 2 == num_connections(ports.grpc)
        watching.cancel()
        del hanging, watching
        end_s = time.monotonic() + 10
        while num_connections(ports.grpc) > 1:
            assert time.monotonic() < end_s, "the connection with the old certificate stays"
            await asyncio.sleep(0.02)
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


async def test_client_keeps_what_works(listen, authority, caplog):
    """A client's file that turns bad is complained of once and its calls go on."""
    pair, client = authority.issue("service"), authority.issue("client")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca)
    async with open_channel(ports.grpc, security=trusting(authority, client)) as channel:
        client.cert.write_text("no certificate")
        for _ in range(2):
            await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert 1 == sum("the old ones stay in force" in record.getMessage() for record in caplog.records)


async def test_silent_connection_does_not_hold_the_metrics_port(listen, authority, monkeypatch, capfd):
    """A client that connects and never begins the handshake keeps nobody from the figures, and is shown out in time."""
    monkeypatch.setattr(metrics, "SCRAPE_TIMEOUT_S", 0.5)
    pair = authority.issue("service")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key)
    host, _, port = ports.metrics.rpartition(":")
    with socket.create_connection((host, port), 10) as silent:
        assert "process_open_fds" in await asyncio.to_thread(scrape, ports.metrics, http_context(authority))
        assert b"" == await asyncio.to_thread(silent.recv, 1)
    assert "Traceback" not in capfd.readouterr().err


async def test_connections_to_the_metrics_port_are_bounded(listen, authority, monkeypatch):
    """One beyond the limit is closed at once; when the others have left, the figures are there again."""
    monkeypatch.setattr(metrics, "MAX_SCRAPES", 2)
    pair, context = authority.issue("service"), http_context(authority)
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key)
    host, _, port = ports.metrics.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection((host, port), 10))
        with pytest.raises(OSError, match=r"closed|reset|EOF"):
            await asyncio.to_thread(scrape, ports.metrics, context)
    end_s = time.monotonic() + 10
    while True:
        try:
            assert "process_open_fds" in await asyncio.to_thread(scrape, ports.metrics, context)
            return
        except OSError:
            assert time.monotonic() < end_s


def test_files_are_checked_before_they_are_used(tmp_path, authority):
    """A pair that does not fit, an encrypted key, an empty CA, half a pair and a missing file are refused by name."""
    one, two = authority.issue("one"), authority.issue("two")
    encrypted, empty = tmp_path / "encrypted.key", tmp_path / "empty.pem"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    empty.write_text("")
    for files in (
        TlsFiles(one.cert, two.key),
        TlsFiles(one.cert, encrypted),
        TlsFiles(one.cert, one.key, empty),
        TlsFiles(one.cert, None),
        TlsFiles(one.cert, tmp_path / "missing"),
        TlsFiles(one.cert, tmp_path),
    ):
        with pytest.raises(InvalidArgumentError, match="TLS"):
            ServerTls(files)


async def test_many_clients_at_once_all_connect(listen, authority):
    """Fifty handshakes at the same time, with a certificate that is checked on both sides, all end well."""
    pair, client = authority.issue("service"), authority.issue("client")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca)
    security = trusting(authority, client)
    assert ["OK"] * 50 == await asyncio.gather(*(status(ports.grpc, security, 20) for _ in range(50)))


@pytest.mark.parametrize(
    ("host", "has", "words"),
    [
        ("127.0.0.1", "", []),
        ("localhost", "", []),
        ("0.0.0.0", "", ["--tls-cert", "--auth-keys", "metrics"]),
        ("10.0.0.1", "tls", ["--auth-keys", "metrics"]),
        ("::", "keys", ["--tls-cert", "metrics"]),
        ("0.0.0.0", "tls keys", ["metrics"]),
        ("0.0.0.0", "tls certificates", []),
    ],
)
def test_what_others_reach_is_warned_of(host, has, words):
    """Each thing that other machines can do unhindered has a warning of its own, with the cure."""
    warnings = exposure(
        host, is_encrypted="tls" in has, asks_for_certificates="certificates" in has, asks_for_keys="keys" in has
    )
    assert len(words) == len(warnings)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:8001", True),
        ("127.8.9.1:8001", True),
        ("[::1]:8001", True),
        ("::1", True),
        ("localhost:8001", True),
        ("dns:///localhost:8001", True),
        ("unix:/run/weft.sock", True),
        ("ipv4:127.0.0.1:8001", True),
        ("10.0.0.1:8001", False),
        ("::", False),
        ("0.0.0.0", False),
        ("localhost.example.org:8001", False),
        ("dns:///router:8001", False),
        ("ipv4:127.0.0.1:8001,10.0.0.1:8001", False),
    ],
)
def test_local_addresses_are_known(address, expected):
    """Loopback by any name and Unix sockets stay on this machine; nothing else does."""
    assert expected is is_local(address)


async def test_key_in_plaintext_to_another_machine_is_warned_of(tmp_path, caplog):
    """A client that would send its key in plaintext beyond this machine says so, and which file it is from."""
    (tmp_path / "key").write_text("shop.secret")
    (tmp_path / "key").chmod(0o600)
    security = ChannelSecurity(key_file=tmp_path / "key")
    async with open_channel("192.0.2.1:1", security=security), open_channel("127.0.0.1:1", security=security):
        pass
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "192.0.2.1:1 in plaintext" in warning
    assert "secret" not in warning


def test_secret_that_everybody_may_read_is_warned_of(tmp_path, authority, caplog):
    """A private key or a client's key that every user may read is named once; one of its owner and group is not."""
    pair, key_file = authority.issue("service"), tmp_path / "key"
    key_file.write_text("shop.secret")
    pair.key.chmod(0o604)
    key_file.chmod(0o640)
    for _ in range(2):
        ServerTls(TlsFiles(pair.cert, pair.key))
        ChannelSecurity(key_file=key_file).check()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(pair.key) in warning
