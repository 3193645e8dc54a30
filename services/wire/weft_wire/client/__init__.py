"""The client on asyncio, with the interface of ``grpc.aio.Channel``."""

from weft_wire.client.channel import Channel
from weft_wire.client.methods import UnaryCall
from weft_wire.client.options import ChannelOptions
from weft_wire.client.outcome import UnansweredError

__all__ = ["Channel", "ChannelOptions", "UnansweredError", "UnaryCall"]
