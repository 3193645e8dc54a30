"""``weft top``: services, queues, rates and latencies as they are now."""

from weft_cli.top.command import run

__all__ = ["run"]
