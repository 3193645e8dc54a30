"""The server on asyncio, with the interface of ``grpc.aio.Server``."""

from weft_wire.server.options import ServerOptions
from weft_wire.server.server import Server

__all__ = ["Server", "ServerOptions"]
