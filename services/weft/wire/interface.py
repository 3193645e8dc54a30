"""The Python interface of gRPC that servers, channels and calls have: grpcio's own where that is installed.

A program that has grpcio sees its classes, so that ``except grpc.aio.AioRpcError``, generated stubs and interceptors
work unchanged. Without it, which saves 18 MB of files, ``plain`` has the same names in plain Python.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc as grpc  # noqa: PLC0414  # exported
else:
    try:
        import grpc
    except ModuleNotFoundError as _missing:
        if _missing.name != "grpc":
            raise
        from weft.wire import plain as grpc

StatusCode = grpc.StatusCode
ChannelConnectivity = grpc.ChannelConnectivity

#: Whether grpcio is installed: its servers and channels, name resolution beyond DNS, and reflection need it.
HAS_GRPCIO: bool = not grpc.__name__.startswith("weft.wire")
