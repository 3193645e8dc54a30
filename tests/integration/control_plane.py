"""A control plane for xDS, as small as gRPC needs it: one listener, one route, one cluster, some endpoints.

Messages are written by field number, because no package has them that may live beside those of OpenTelemetry.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

_TYPES = "type.googleapis.com/envoy"
LISTENER = f"{_TYPES}.config.listener.v3.Listener"
CLUSTER = f"{_TYPES}.config.cluster.v3.Cluster"
ENDPOINTS = f"{_TYPES}.config.endpoint.v3.ClusterLoadAssignment"
_CONNECTION_MANAGER = f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_TYPES}.extensions.filters.http.router.v3.Router"
_BY_EDS = 3


def message(*fields: tuple[int, bytes | str | int]) -> bytes:
    """Bytes of a message with these fields."""
    data = b""
    for number, value in fields:
        if isinstance(value, int):
            data += _varint(number << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += _varint(number << 3 | 2) + _varint(len(content)) + content
    return data


def _varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def _any(type_url: str, value: bytes) -> bytes:
    return message((1, type_url), (2, value))


def resources(name: str, addresses: Sequence[str]) -> Mapping[str, bytes]:
    """What a client of ``xds:///name`` asks for, by type."""
    route = message((1, message((1, ""))), (2, message((1, "cluster"))))
    routes = message((1, "routes"), (2, message((1, "host"), (2, "*"), (3, route))))
    filters = message((1, "router"), (4, _any(_ROUTER, b"")))
    manager = _any(_CONNECTION_MANAGER, message((4, routes), (5, filters)))
    over_this_stream = message((3, b""))
    endpoints: list[tuple[int, bytes]] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket_address = message((2, host), (3, int(port)))
        endpoints.append((2, message((1, message((1, message((1, socket_address))))))))
    locality = message((1, message((2, "zone"))), *endpoints, (3, message((1, 1))))
    return {
        LISTENER: message((1, name), (19, message((1, manager)))),
        CLUSTER: message((1, "cluster"), (2, _BY_EDS), (3, message((1, over_this_stream)))),
        ENDPOINTS: message((1, "cluster"), (2, locality)),
    }


@contextmanager
def control_plane(name: str, addresses: Sequence[str]) -> Iterator[str]:
    """Address of a control plane that knows one name."""
    known = resources(name, addresses)

    def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            fields = {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(request))}
            if 5 in fields:  # a nonce: the client takes over, or refuses, what it was sent
                assert 6 not in fields, f"refused: {fields[6]!r}"
                continue
            type_url = fields[4].decode()
            yield message((1, "1"), (2, _any(type_url, known[type_url])), (4, type_url), (5, "1"))

    handler = grpc.stream_stream_rpc_method_handler(stream)
    service = "envoy.service.discovery.v3.AggregatedDiscoveryService"
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"StreamAggregatedResources": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
