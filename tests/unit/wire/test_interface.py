"""The types of ``grpc`` in plain Python, for processes without grpcio, are those of grpcio as far as Weft uses them."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from weft.wire import plain
from weft.wire.interface import HAS_GRPCIO
from weft.wire.interface import grpc as chosen

ROOT = Path(__file__).resolve().parents[3]
#: What only grpcio's own servers and channels take; where they are made, its absence is an error of its own.
OF_GRPCIO = {
    "ServerCertificateConfiguration", "aio.insecure_channel", "aio.secure_channel", "aio.server",
    "dynamic_ssl_server_credentials", "ssl_channel_credentials", "ssl_server_certificate_configuration",
}  # fmt: skip


def names_used() -> Iterator[str]:
    """What the services take of the module ``grpc`` when they run, as ``StatusCode`` and ``aio.Channel``."""
    for path in (ROOT / "services").rglob("*.py"):
        text = path.read_text()
        if "from weft.wire.interface import" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name.startswith("grpc.") and name != "grpc.aio":
                    parts = name.split(".")[1:]
                    yield ".".join(parts[:2] if parts[0] == "aio" else parts[:1])


def test_whatever_is_used_is_there() -> None:
    """Every name that the services use exists in plain Python, but for those of grpcio's own servers and channels."""

    def has(owner: Any, name: str) -> bool:
        head, _, rest = name.partition(".")
        return hasattr(owner, head) and (not rest or has(getattr(owner, head), rest))

    used = set(names_used())
    assert {"StatusCode", "aio.Channel", "aio.AioRpcError"} <= used
    assert set() == {name for name in used - OF_GRPCIO if not has(plain, name)}


def test_types_are_those_of_grpcio() -> None:
    """It is taken where it is installed; enumerations have its names and values in its order, the end is false."""
    assert HAS_GRPCIO
    assert chosen is grpc
    for name in ("StatusCode", "ChannelConnectivity", "Compression"):
        ours, theirs = getattr(plain, name), getattr(grpc, name)
        assert [(one.name, one.value) for one in theirs] == [(one.name, one.value) for one in ours]
    assert not plain.aio.EOF  # loops that read until it may test for truth
    assert "EOF" in repr(plain.aio.EOF)


def test_metadata_read_the_same() -> None:
    """A key may repeat; the first value is that of the key; pairs are iterated."""
    pairs = ("a", "1"), ("b", b"2"), ("a", "3")
    for made in (plain.aio.Metadata(*pairs), grpc.aio.Metadata(*pairs)):
        assert "1" == made["a"] == made.get("a")
        assert ["1", "3"] == list(made.get_all("a"))
        assert "-" == made.get("c", "-")
        assert ["a", "b"] == list(made.keys())
        assert sorted(map(str, pairs)) == sorted(map(str, made))
        assert 3 == len(made)
        assert "b" in made
        assert "c" not in made
        with pytest.raises(KeyError):
            made["c"]


def test_errors_of_calls_tell_the_same() -> None:
    """Status, message and trailing metadata; text and pickle keep them."""
    for module in (plain, grpc):
        trailing = module.aio.Metadata(("retry-after-ms", "5"))
        error = module.aio.AioRpcError(module.StatusCode.UNAVAILABLE, None, trailing, "gone", "gone far")
        assert isinstance(error, module.RpcError)
        again = pickle.loads(pickle.dumps(error))
        for one in (error, again):
            assert module.StatusCode.UNAVAILABLE is one.code()
            assert ("gone", "gone far") == (one.details(), one.debug_error_string())
            assert [("retry-after-ms", "5")] == list(one.trailing_metadata())
            assert "StatusCode.UNAVAILABLE" in str(one)
            assert "gone" in repr(one)


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_handlers_of_methods_are_found_by_their_path(kind: str) -> None:
    """Each kind says whether requests and responses are streams, and has its function under its own name."""

    class Details:
        method = "/a.B/C"

    def behave() -> None: ...

    for module in (plain, grpc):
        made = getattr(module, f"{kind}_rpc_method_handler")(behave, bytes, str)
        handler = module.method_handlers_generic_handler("a.B", {"C": made})
        found = handler.service(Details)
        assert (kind.startswith("stream"), kind.endswith("stream")) == (
            found.request_streaming,
            found.response_streaming,
        )
        assert (behave, bytes, str) == (getattr(found, kind), found.request_deserializer, found.response_serializer)
        Details.method = "/a.B/D"
        assert handler.service(Details) is None
        Details.method = "/a.B/C"
