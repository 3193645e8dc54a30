"""Handshakes with the contexts that servers outside grpcio listen with, before and after files change."""

import asyncio
import os
import socket
import ssl

import pytest
from tests.certificates import Authority

from weft.v2.security.tls import ServerTls, TlsFiles

OLD_TLS = ssl.TLSVersion.TLSv1_2


class Handshakes:
    """A server that shakes hands and closes, and the clients' side of it.

    Args:
        tls: Of the server.
        authority: Issued the server's certificate.
    """

    def __init__(self, tls: ServerTls, authority: Authority) -> None:
        self._listening = tls.grpc_context()
        self._authority = authority

    def client(self, pair=None, *, newest=None, protocols=("h2",)) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._authority.ca)
        context.set_alpn_protocols(list(protocols))
        if newest is not None:
            context.maximum_version = newest
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    async def shake(self, context, session=None):
        """The client's protocol, its session, and whether it was resumed; raises what either side fails with."""
        ours, theirs = socket.socketpair()

        def serve():
            with self._listening.wrap_socket(theirs, server_side=True) as secured:
                secured.sendall(b"x")
                secured.unwrap()

        def call():
            with context.wrap_socket(ours, server_hostname="service", session=session) as secured:
                secured.recv(1)
                seen = secured.selected_alpn_protocol(), secured.session, secured.session_reused
                secured.unwrap()
            return seen

        _, seen = await asyncio.wait_for(asyncio.gather(*map(asyncio.to_thread, (serve, call))), 10)
        return seen


@pytest.fixture
def server(authority, tmp_path, looks_always):
    """Listens with a certificate, and asks for those of the authority whose file is ``clients.pem``."""
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca.read_bytes())
    pair = authority.issue("service")
    return Handshakes(ServerTls(TlsFiles(pair.cert, pair.key, clients)), authority)


async def test_http2_alone_is_offered(server, authority):
    """A client that offers h2 gets it; one that offers something else gets no protocol, which the server refuses."""
    pair = authority.issue("client")
    assert "h2" == (await server.shake(server.client(pair)))[0]
    assert (await server.shake(server.client(pair, protocols=["http/1.1"])))[0] is None


@pytest.mark.parametrize("newest", [None, OLD_TLS])
async def test_new_client_ca_counts_from_the_next_handshake_on(server, authority, tmp_path, newest):
    """After a change the new CA's clients get HTTP/2; the old one's fail, also when they resume, or show none."""
    old, other = authority.issue("client"), Authority(tmp_path, "other")
    new = other.issue("newcomer")
    before = server.client(old, newest=newest)
    _, session, _ = await server.shake(before)
    with pytest.raises((ssl.SSLError, OSError)):
        await server.shake(server.client(new, newest=newest))
    (tmp_path / "draft").write_bytes(other.ca.read_bytes())
    os.replace(tmp_path / "draft", tmp_path / "clients.pem")
    assert "h2" == (await server.shake(server.client(new, newest=newest)))[0]
    for context, resumed in ((before, session), (before, None), (server.client(None, newest=newest), None)):
        with pytest.raises((ssl.SSLError, OSError)):
            await server.shake(context, resumed)


async def test_session_is_resumed_while_nothing_changes(server, authority):
    """With TLS 1.2, by its id; tickets, which TLS 1.3 resumes by, are not given out."""
    pair = authority.issue("client")
    for newest, is_resumed in ((OLD_TLS, True), (None, False)):
        client = server.client(pair, newest=newest)
        _, session, _ = await server.shake(client)
        assert is_resumed is (await server.shake(client, session))[2]


async def test_versions_before_1_2_are_refused(server, authority):
    """TLS 1.1 ends with an alert."""
    client = server.client(authority.issue("client"))
    client.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        await server.shake(client)


async def test_ciphers_that_http2_forbids_are_refused(server, authority):
    """Of TLS 1.2 only the suites with forward secrecy and authenticated encryption are left (RFC 9113, appendix A)."""
    for suite, is_taken in (("ECDHE-ECDSA-AES128-GCM-SHA256", True), ("ECDHE-ECDSA-AES128-SHA256", False)):
        client = server.client(authority.issue("client"), newest=OLD_TLS)
        client.set_ciphers(suite)
        if is_taken:
            await server.shake(client)
            continue
        with pytest.raises((ssl.SSLError, OSError)):
            await server.shake(client)


async def test_http_context_offers_no_http2(authority, looks_always):
    """The context of the metrics port and the gateway knows no ALPN, so nobody takes it for gRPC's."""
    pair = authority.issue("service")
    served = Handshakes(ServerTls(TlsFiles(pair.cert, pair.key)), authority)
    served._listening = ServerTls(TlsFiles(pair.cert, pair.key)).http_context()
    assert (await served.shake(served.client()))[0] is None
