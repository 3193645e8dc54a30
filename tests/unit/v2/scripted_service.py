"""A service process with the scripted core: ``python scripted_service.py [--hold-load | --fail-load | ...] OPTIONS``.

SIGUSR1 releases the calls of the model ``hang``. What the core does is told on standard error, one JSON line each.
"""

import argparse
import asyncio
import json
import os
import signal
import sys

from scripted_core import ScriptedCore

from weft.base.errors import NotFoundError, ResourceExhaustedError
from weft.base.statistics import LatencyHistogram
from weft.v2.server import server


def tell(**fields):
    os.write(2, json.dumps(fields).encode() + b"\n")  # at once, for the log is written to it too


class OwnedCore(ScriptedCore):
    """Loads and closes as the options say."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        self.ready = not options.lack_model
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.release.set)
        histogram = LatencyHistogram()
        histogram.observe(0.003, trace_id="ab" * 16, unix_time_s=1700000000.0)
        histogram.observe(0.004)
        histogram.observe(99.0)
        self.counters[0].request_latency[2] = histogram
        self.counters[1].record_failure(ResourceExhaustedError("full"), 1_000_000)

    async def start(self):
        tell(core="loading")
        if self.options.fail_load:
            raise NotFoundError("model repository '/nowhere' does not exist")
        try:
            await asyncio.Event().wait() if self.options.hold_load else None
        except asyncio.CancelledError:
            tell(core="loading cancelled")
            raise

    def statistics(self, name, version):
        asyncio.get_running_loop()  # raises on any other thread than the event loop's, which owns the counters
        return super().statistics(name, version)

    async def infer(self, call, context):
        if call.model_name == "hang":
            tell(core="hanging")
        try:
            return await super().infer(call, context)
        except asyncio.CancelledError:
            tell(core="cancelled")
            raise

    async def close(self, *, grace_s):
        tell(core="closed", grace_s=grace_s)


def main():
    parser = argparse.ArgumentParser()
    server.add_arguments(parser, grpc_port=0, metrics_port=0)
    parser.add_argument("--hold-load", action="store_true")
    parser.add_argument("--fail-load", action="store_true")
    parser.add_argument("--lack-model", action="store_true")
    options = parser.parse_args()
    return server.run("scripted", lambda: OwnedCore(options), options)


if __name__ == "__main__":
    sys.exit(main())
