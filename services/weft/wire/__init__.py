"""gRPC over HTTP/2 for asyncio, in pure Python: server and client. Imports no other package of Weft."""
