"""Message brokers by the scheme of their address; a new one is a module and a line here."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from urllib.parse import parse_qsl, urlsplit

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.jobs.brokers.broker import PASSWORD_FILE, Address, Broker

#: Module and class of each broker, imported when it is used: its client is a package of its own.
BROKERS = {
    "nats": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "tls": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "redis": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "rediss": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "kafka": ("weft.jobs.brokers.kafka", "KafkaBroker"),
    "kafka+ssl": ("weft.jobs.brokers.kafka", "KafkaBroker"),
}


def parse_address(text: str) -> Address:
    """An address such as ``nats://127.0.0.1:4222/orders``, with options behind ``?``.

    Raises:
        InvalidArgumentError: The scheme is unknown, or there is no name of a topic.
    """
    parts = urlsplit(text)
    topic = parts.path.removeprefix("/")
    if parts.scheme not in BROKERS or not parts.netloc or not topic:
        raise InvalidArgumentError(
            f"'{text}' must be SCHEME://HOST:PORT/TOPIC, with the scheme one of {', '.join(BROKERS)}"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Address(f"{parts.scheme}://{parts.netloc}", topic, options)


def make_broker(address: Address, group: str, ack_wait_s: float) -> Broker:
    """A broker that is not connected.

    Args:
        address: Its server and options count; one broker serves all topics.
        group: Consumers of one group share the messages of a topic.
        ack_wait_s: After so long without a sign of life of its consumer a message is delivered again.

    Raises:
        UnsupportedError: Its client is not installed.
        InvalidArgumentError: It has no such option, or not with such a value.
    """
    module, name = BROKERS[address.scheme]
    try:
        kind = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{address.name} needs the package '{error.name}': pip install 'weft-mesh[streams]'"
        ) from error
    known: Mapping[str, Sequence[str]] = {PASSWORD_FILE: (), **kind.OPTIONS}
    for name, value in address.options.items():
        if name not in known:
            raise InvalidArgumentError(f"{address.name} has no option '{name}'; it has {', '.join(known)}")
        if known[name] and value not in known[name]:
            raise InvalidArgumentError(
                f"{name} of {address.name} must be one of {', '.join(known[name])}, got '{value}'"
            )
    broker: Broker = kind(address, group, ack_wait_s)
    return broker
