"""The server on asyncio, with the interface of ``grpc.aio.Server``."""
