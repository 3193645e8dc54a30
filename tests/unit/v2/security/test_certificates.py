"""Clients known by their certificate, as service meshes have it."""

import json

import pytest
from tests.unit.v2.builders import code, make_request

from weft.base.errors import InvalidArgumentError, UnauthenticatedError
from weft.base.security.access import KeyRing
from weft.base.security.keys import new_key, read_keys
from weft.v2.client.channels import open_channel
from weft.v2.security.channel import ChannelSecurity
from weft.v2.security.tls import TlsFiles
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture
async def opened(listen, authority, tmp_path):
    """Opens a channel to a service where ``shop`` has a certificate, ``lab`` a key, and the rest neither."""
    key, line = new_key("lab")
    (tmp_path / "lab.key").write_text(key)
    shop = {"name": "shop", "certificates": ["shop.example", "spiffe://mesh/shop"], "models": ["echo"]}
    keys = tmp_path / "keys"
    keys.write_text("\n".join((line, json.dumps(shop))))
    pair = authority.issue("service")
    ports = await listen(
        *("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca, "--auth-keys", keys)
    )

    def open_with(name, key_file=None, uri=""):
        tls = TlsFiles(*authority.issue(name, uri=uri), authority.ca)  # type: ignore[call-arg]
        return open_channel(ports.grpc, security=ChannelSecurity(tls, "service", key_file))

    return open_with


async def test_certificate_stands_for_a_key(opened, core):
    """Who shows a certificate with a known name calls as that line says, in every kind of call."""
    async with opened("shop.example") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert "OK" == await code(stub.ModelInfer(make_request("echo"), timeout=5))
        assert "PERMISSION_DENIED" == await code(stub.ModelInfer(make_request("fail"), timeout=5))
        assert "PERMISSION_DENIED" == await code(stub.LogSettings(pb.LogSettingsRequest(), timeout=5))
        stream = stub.ModelStreamInfer(iter([make_request("echo"), make_request("fail")]), timeout=5)
        assert [False, True] == ["does not allow 'fail'" in a.error_message async for a in stream]
    assert {"shop"} == {context.client_key for _, context in core.calls}


async def test_uri_of_a_mesh_is_a_name(opened, core):
    """The SPIFFE id that a service mesh writes into its certificates is a name as others are."""
    async with opened("x", uri="spiffe://mesh/shop") as channel:
        assert "OK" == await code(GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo"), timeout=5))
    ((_, context),) = core.calls
    assert "shop" == context.client_key


async def test_certificate_without_a_line_needs_a_key(opened, tmp_path, core):
    """A certificate of the CA that no line names opens nothing by itself; with a key the key says who calls."""
    async with opened("stranger") as channel:
        stub = GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(timeout=5)  # a write that fails would hide the status
        for call in (stub.ModelInfer(make_request("echo"), timeout=5), stream.read()):
            assert "UNAUTHENTICATED" == await code(call)
        assert [] == core.calls
    async with opened("shop.example", tmp_path / "lab.key") as channel:
        assert "OK" == await code(GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo"), timeout=5))
    ((_, context),) = core.calls
    assert "lab" == context.client_key


async def test_wrong_key_is_not_mended_by_a_certificate(opened, tmp_path):
    """Who sends a key that is not valid is refused, whatever the certificate."""
    (tmp_path / "lab.key").write_text("lab.wrong")
    async with opened("shop.example", tmp_path / "lab.key") as channel:
        assert "UNAUTHENTICATED" == await code(
            GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo"), timeout=5)
        )


async def test_without_a_client_ca_no_certificate_counts(listen, authority, tmp_path):
    """A certificate that nobody verifies names nobody."""
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "shop", "certificates": ["shop.example"]}))
    pair = authority.issue("service")
    ports = await listen("--tls-cert", pair.cert, "--tls-key", pair.key, "--auth-keys", keys)
    tls = TlsFiles(*authority.issue("shop.example"), authority.ca)  # type: ignore[call-arg]
    async with open_channel(ports.grpc, security=ChannelSecurity(tls)) as channel:
        assert "UNAUTHENTICATED" == await code(
            GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo"), timeout=5)
        )


def test_names_of_several_clients_name_none(tmp_path):
    """Lines may not share a name; a certificate that has names of two lines is neither's, and a line alone is found."""
    keys = tmp_path / "keys"
    lines = [{"name": "a", "certificates": ["spiffe://mesh/a", "a"]}, {"name": "b", "certificates": "b"}]
    keys.write_text("\n".join(map(json.dumps, lines)))
    ring = KeyRing([keys])
    assert "a" == ring.identify_certificate(["x", "spiffe://mesh/a", "a"]).name
    for names in (["a", "b"], ["x"], [], [""], ["A"]):
        with pytest.raises(UnauthenticatedError):
            ring.identify_certificate(names)
    for key in ("a.", "a.x", "b", ""):
        with pytest.raises(UnauthenticatedError):
            ring.identify([("x-api-key", key)])
    keys.write_text("\n".join(json.dumps(line | {"certificates": "same"}) for line in lines))  # type: ignore[operator]
    with pytest.raises(InvalidArgumentError, match="'same' is that of 'a' already"):
        read_keys([keys])
    keys.write_text(json.dumps({"name": "a"}))
    with pytest.raises(InvalidArgumentError, match="'sha256' is missing"):
        read_keys([keys])
