"""TLS and keys between the router and its targets: what the command line says, and a real target that asks for both."""

import argparse
import contextlib

import pytest
from tests.certificates import Authority
from tests.integration.routing import NamingCore

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, RemoteError
from weft.base.security.access import KeyRing
from weft.base.security.keys import new_key
from weft.base.tensors import bytes_tensor
from weft.router.targets.connect import make_target
from weft.router.targets.specification import add_target_security_arguments, target_securities
from weft.v2.security.tls import ServerTls, TlsFiles
from weft.v2.server.listening import AccessInterceptor
from weft.v2.server.make_server import add_tls_port, make_server
from weft.v2.server.server import add_services


def securities(*arguments, targets=(("model", "h:1"), ("pre", "h:2"))):
    parser = argparse.ArgumentParser()
    add_target_security_arguments(parser)
    options = parser.parse_args(list(map(str, arguments)))
    options.target = list(targets)
    return target_securities(options)


def test_value_for_one_target_beats_that_for_all(tmp_path):
    """A value without a name is every target's; one with a name is that target's alone, and wins there."""
    all_ca, own_ca = Authority(tmp_path, "all").ca, Authority(tmp_path, "own").ca
    found = securities("--target-tls-ca", all_ca, "--target-tls-ca", f"model={own_ca}", "--target-tls-name", "pre=p")
    assert {"model": own_ca, "pre": all_ca} == {name: security.tls.ca for name, security in found.items()}
    assert {"model": "", "pre": "p"} == {name: security.server_name for name, security in found.items()}
    assert {"pre"} == securities("--target-tls-ca", f"pre={own_ca}").keys()
    assert {} == securities()


def test_path_with_an_equals_sign_is_a_path(tmp_path):
    """What has a folder in front of its "=" is a path, and for all."""
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert {"model", "pre"} == securities("--target-tls-ca", Authority(folder).ca).keys()


def test_wrong_use_is_told(tmp_path):
    """Unknown targets, values given twice, TLS without a CA and files that are not there are refused by name."""
    ca = Authority(tmp_path).ca
    for arguments, message in (
        (["--target-tls-ca", f"nobody={ca}"], "no target 'nobody', only model, pre"),
        (["--target-tls-ca", ca, "--target-tls-ca", ca], "given twice for all targets"),
        (["--target-tls-ca", f"pre={ca}", "--target-tls-ca", f"pre={ca}"], "given twice for target 'pre'"),
        (["--target-tls-name", "pre=x"], "target 'pre': TLS needs the CA"),
        (["--target-tls-ca", tmp_path / "missing"], "missing cannot be read"),
        (["--target-tls-ca", ca, "--target-tls-key", ca], "needs its key"),
        (["--target-key-file", tmp_path], "key file"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            securities(*arguments)


@contextlib.asynccontextmanager
async def closed_service(authority, keys, name="service"):
    """Port of a service that asks for a certificate and a key."""
    pair = authority.issue(name)
    server = make_server(interceptors=[AccessInterceptor(KeyRing([keys]), "naming")])
    add_services(server, NamingCore(), "naming")
    tls = ServerTls(TlsFiles(pair.cert, pair.key, authority.ca))
    port = add_tls_port(server, "127.0.0.1:0", tls)
    await server.start()
    yield port
    await server.stop(None)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "dns:///localhost:{}", "ipv4:127.0.0.1:{}"])
async def test_target_is_reached_with_certificate_and_key(tmp_path, address):
    """A target that asks for both answers over one address, over a name with replicas, and over gRPC's own list."""
    authority = Authority(tmp_path)
    client = authority.issue("router")
    key, line = new_key("router")
    keys, key_file = tmp_path / "keys", tmp_path / "key"
    keys.write_text(line)
    key_file.write_text(key)
    tls = ("--target-tls-ca", authority.ca, "--target-tls-cert", client.cert, "--target-tls-key", client.key)
    async with closed_service(authority, keys) as port:
        target_address = address.format(port)
        call = InferCall("alpha", inputs={"X": bytes_tensor([b"hi"], (1,))})
        for arguments, error in (
            ((*tls, "--target-key-file", key_file), ""),
            (tls, "UNAUTHENTICATED"),
            ((*tls[:2], "--target-key-file", key_file), "UNAVAILABLE"),
            ((*tls, "--target-key-file", key_file, "--target-tls-name", "another"), "UNAVAILABLE"),
        ):
            (security,) = securities(*arguments, targets=[("model", target_address)]).values()
            target = make_target("model", target_address, security=security)
            try:
                if error:
                    with pytest.raises(RemoteError) as caught:
                        await target.discover(timeout_s=5)
                    assert error == caught.value.code
                else:
                    found = await target.discover(timeout_s=5)
                    assert "alpha" in {model.signature.name for model in found}
                    result = await target.infer(call, CallContext())
                    assert b"hi,alpha" in result.outputs["NAME"].data
            finally:
                await target.close()
