"""The server on asyncio, with the interface of ``grpc.aio.Server``."""

from weft.wire.server.methods import ServerOptions
from weft.wire.server.server import Server

__all__ = ["Server", "ServerOptions"]
