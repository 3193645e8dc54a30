"""The client on asyncio, with the interface of ``grpc.aio.Channel``."""

from weft.wire.client.call import UnansweredError
from weft.wire.client.calls import UnaryCall
from weft.wire.client.channel import Channel
from weft.wire.client.protocol import ChannelOptions

__all__ = ["Channel", "ChannelOptions", "UnansweredError", "UnaryCall"]
