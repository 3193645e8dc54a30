"""The client on asyncio, with the interface of ``grpc.aio.Channel``."""

from weft_wire.client.call import UnansweredError
from weft_wire.client.channel import Channel
from weft_wire.client.options import ChannelOptions

__all__ = ["Channel", "ChannelOptions", "UnansweredError"]
