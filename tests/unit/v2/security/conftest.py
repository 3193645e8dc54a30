"""A service that listens as its arguments say, with the scripted core behind it."""

import argparse
import contextlib

import pytest
from tests.certificates import Authority

from weft.base.security import files
from weft.v2.server import server as weft_server
from weft.v2.server.listening import Listener


@pytest.fixture
def authority(tmp_path):
    """A certificate authority whose files are in ``tmp_path``."""
    return Authority(tmp_path)


@pytest.fixture
def looks_always(monkeypatch):
    """Files are looked at whenever their content is asked for."""
    monkeypatch.setattr(files, "CHECK_PERIOD_S", 0.0)


@pytest.fixture
async def listen(core, looks_always):
    """Starts a service with these arguments and gives its ports."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*arguments, memory=None):
            parser = argparse.ArgumentParser()
            weft_server.add_arguments(parser, grpc_port=0, metrics_port=0)
            listener = Listener("weft.test", parser.parse_args(map(str, arguments)))
            services = weft_server.add_services(listener.server, core, "weft.test", memory=memory)
            ports = listener.listen(lambda: core.counters, ())
            await listener.server.start()
            stack.push_async_callback(listener.server.stop, None)
            services.health.set_serving(True)
            return ports

        yield start
