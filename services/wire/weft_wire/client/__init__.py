"""The client on asyncio, with the interface of ``grpc.aio.Channel``."""
