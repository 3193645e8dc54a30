"""The Python interface of gRPC (channels, calls, servers): grpcio's own classes where it is installed.

So ``except grpc.aio.AioRpcError``, generated stubs and interceptors work unchanged beside grpcio. Without it, which
saves 18 MB of files, ``plain`` defines the same names in plain Python.
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
