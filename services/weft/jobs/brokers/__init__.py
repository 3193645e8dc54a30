"""Message brokers by the scheme of their address; a new one is a module and a line here."""

from importlib import import_module
from urllib.parse import urlsplit

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.jobs.brokers.broker import Address, Broker

#: The default of ``make_broker``.
ACK_WAIT_S = 30.0
#: Module and class of each broker, imported when it is used: its client is a package of its own.
BROKERS = {
    "nats": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "tls": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "redis": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "rediss": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "kafka": ("weft.jobs.brokers.kafka", "KafkaBroker"),
}


def parse_address(text: str) -> Address:
    """An address such as ``nats://127.0.0.1:4222/orders``.

    Raises:
        InvalidArgumentError: The scheme is unknown, or there is no name of a topic.
    """
    parts = urlsplit(text)
    topic = parts.path.removeprefix("/")
    if parts.scheme not in BROKERS or not parts.netloc or not topic:
        raise InvalidArgumentError(
            f"'{text}' must be SCHEME://HOST:PORT/TOPIC, with the scheme one of {', '.join(BROKERS)}"
        )
    return Address(f"{parts.scheme}://{parts.netloc}", topic)


def make_broker(server: str, group: str, ack_wait_s: float = ACK_WAIT_S) -> Broker:
    """A broker that is not connected.

    Args:
        server: ``SCHEME://HOST:PORT``.
        group: Consumers of one group share the messages of a topic.
        ack_wait_s: After so long without a sign of life of its consumer a message is delivered again.

    Raises:
        UnsupportedError: Its client is not installed.
    """
    module, name = BROKERS[urlsplit(server).scheme]
    try:
        broker: Broker = getattr(import_module(module), name)(server, group, ack_wait_s)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{server} needs the package '{error.name}': pip install 'weft-mesh[streams]'"
        ) from error
    return broker
