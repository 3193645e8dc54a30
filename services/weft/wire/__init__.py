"""HTTP/2 and gRPC in pure Python for asyncio: server and client with the interfaces of ``grpc.aio``.

It imports no other package of Weft. ``docs/wire.md`` has the guarantees, the limits and the figures.
"""
