"""``weft stream``: messages of a broker through a graph, until a signal ends it."""

import argparse
import asyncio
import signal

from weft.base.errors import UnsupportedError
from weft.base.observing.logs import configure, get_logger
from weft.tools.request import parameter_value
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft.v2.server.metrics import serve_metrics


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 0 once what was in work is answered or given back."""
    asyncio.run(_stream(options))
    return 0


async def _stream(options: argparse.Namespace) -> None:
    try:
        from weft.jobs.brokers import make_broker, parse_address  # noqa: PLC0415  # pyarrow is an extra
        from weft.jobs.stream import MessageStream, StreamMetrics, StreamOptions  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"weft stream needs '{error.name}': pip install 'weft-mesh[streams]'") from error
    source, target = parse_address(options.source), parse_address(options.to)
    job = StreamOptions(
        graph=options.graph,
        source=source,
        target=target,
        dead_letters=options.dead_letters or f"{source.topic}.dead",
        order_by=options.order_by,
        column_of=dict(options.column),
        outputs=options.write,
        keep=options.keep,
        parameters={name: parameter_value(value) for name, value in options.param},
        rows_per_request=options.rows_per_request,
        max_inflight=options.max_inflight,
        max_deliveries=options.max_deliveries,
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
        grace_s=options.grace_s,
        ack_wait_s=options.ack_wait_s,
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
