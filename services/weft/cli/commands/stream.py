"""``weft stream``: messages of a broker through a graph, until a signal ends it."""

import argparse
import asyncio
import signal
from functools import partial

from weft.base.observing.logs import configure, get_logger
from weft.base.text.argument_types import add, positive, positive_integer
from weft.cli.arguments import add_router_arguments, made, pair, port
from weft.tools.request import parameter_value
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft.v2.server.metrics import serve_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft stream``."""
    option = partial(add, parser)
    parser.description = (
        "Take messages from NATS JetStream, Redis Streams or Kafka, run each through a graph or model, and "
        "write the answers to a broker, at least once, until a signal ends it."
    )
    parser.epilog = (
        "example: weft stream triage --from nats://127.0.0.1:4222/tickets --to nats://127.0.0.1:4222/answers"
    )
    option("graph GRAPH", "graph or model; NAME/VERSION for one version")
    option(
        "--from SCHEME://HOST:PORT/TOPIC",
        "messages; options of the broker behind ?: docs/jobs.md",
        required=True,
        dest="source",
    )
    option("--to SCHEME://HOST:PORT/TOPIC", "answers", required=True)
    option("--dead-letters TOPIC", "messages without an answer, at the broker of --from; default: TOPIC.dead")
    option("--group NAME (weft)", "consumers that share the messages")
    option("--order-by FIELD", "answer messages with an equal value one after another", default="")
    option("--column INPUT=FIELD ...", "default: the input's name", pair)
    option("--write OUTPUT ...", "write only this; may be repeated")
    option("--keep FIELD ...", "write this field of the message too")
    option("--param NAME=VALUE ...", "parameter of every request", pair)
    option("--rows-per-request N", "default: the largest batch", positive_integer, 0)
    option("--max-inflight N (256)", "messages in work", positive_integer)
    option("--max-deliveries N (5)", "a message that was delivered more often is a dead letter", positive_integer)
    option("--ack-wait-s N (30)", "the broker delivers a message again after so long without a sign of life", positive)
    option("--timeout-ms N (60000)", "deadline of a request", positive)
    option("--grace-s N (10)", "for what is in work at the end", positive)
    option("--metrics-port PORT", "serve metrics there; 0: a free one", port)
    add_router_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 0 once all messages in flight are answered or given back."""
    asyncio.run(_stream(options))
    return 0


async def _stream(options: argparse.Namespace) -> None:
    from weft.jobs.brokers import make_broker, parse_address  # noqa: PLC0415  # pyarrow is an extra
    from weft.jobs.stream import MessageStream, StreamMetrics, StreamOptions  # noqa: PLC0415

    source, target = parse_address(options.source), parse_address(options.to)
    job = made(
        StreamOptions,
        options,
        source=source,
        target=target,
        dead_letters=options.dead_letters or f"{source.topic}.dead",
        column_of=dict(options.column),
        outputs=options.write,
        parameters={name: parameter_value(value) for name, value in options.param},
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
    )
    configure()
    metrics = StreamMetrics()
    source_broker = make_broker(source, options.group, options.ack_wait_s)
    same = (source.server, source.options) == (target.server, target.options)
    target_broker = source_broker if same else make_broker(target, options.group, options.ack_wait_s)
    async with V2Client(options.url, security=channel_security(options)) as client:
        stream = MessageStream(client, source_broker, target_broker, job, metrics)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stream.end)
        if options.metrics_port is not None:
            port = serve_metrics(metrics.registry, "127.0.0.1", options.metrics_port)
            get_logger("weft.stream").info("serving", extra={"metrics": f"127.0.0.1:{port}"})
        await stream.run()
