"""``weft top``: draws frames until Ctrl-C, or prints one."""

import argparse
import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add, positive
from weft.base.text.suggestion import printable
from weft.cli.arguments import ROUTER_PORT, pair
from weft.mesh.registry import SeveralMeshesError, the_mesh
from weft.tools.top import frame_text
from weft.v2.client.frames import Frame, frame_of, scrape
from weft.v2.security.channel import channel_security
from weft.v2.security.tls import http_context

_ROUTER = f"127.0.0.1:{ROUTER_PORT + 1}"
_ALTERNATE_SCREEN, _NORMAL_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft top``."""
    option = partial(add, parser)
    parser.description = (
        "Show services, queues, rates and latencies, from the metrics of the router and of other services."
    )
    parser.epilog = "example: weft top --url 127.0.0.1:8002"
    option(
        "--url ADDRESS",
        "the router's metrics, if no other service is given, and every service where a weft up of this user runs "
        f"there; default: the only weft up that runs, else 127.0.0.1:{ROUTER_PORT + 1}",
    )
    option("--service NAME=ADDRESS ...", "the metrics of a service, HOST:PORT or a URL; may be repeated", pair)
    option("--endpoints FILE", "every service of a mesh: the line that weft up --json prints", Path)
    option("--interval-s S (1)", "between frames", positive)
    option("--once", "print one frame, as without a terminal")
    option("--json", "print one frame as JSON")
    add_channel_arguments(
        parser.add_argument_group("security, of addresses that begin with https"), takes_key=False, takes_name=False
    )


def run(options: argparse.Namespace) -> int:
    """Show frames; 0 if a service answered in the last one, else 1; 2: the addresses cannot be used."""
    try:
        addresses = _addresses(options)
    except SeveralMeshesError as error:
        print(f"weft top: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"weft top: {options.endpoints}: {error!r}; give the line that `weft up --json` prints", file=sys.stderr)
        return 2
    try:
        security = channel_security(options)
        tls = None if security is None else http_context(security.tls)
    except WeftError as error:
        print(f"weft top: {error.message}", file=sys.stderr)
        return 2
    is_live = not (options.once or options.json) and sys.stdout.isatty()
    before = scrape(addresses, tls)
    if not is_live:
        time.sleep(options.interval_s)
        frame = frame_of(addresses, before, scrape(addresses, tls))
        print(json.dumps(asdict(frame)) if options.json else printable(frame_text(frame)))
        return _status(frame)
    last: Frame | None = None
    interrupted = _on_interrupt()
    sys.stdout.write(_ALTERNATE_SCREEN)
    try:
        while not select.select([interrupted], [], [], options.interval_s)[0]:
            now = scrape(addresses, tls)
            last = frame_of(addresses, before, now)
            # The next interval of a service that did not answer begins at its last answer.
            before = {name: before[name] if page.error else page for name, page in now.items()}
            size = shutil.get_terminal_size()
            text = printable(frame_text(last, width=size.columns, height=size.lines - 1))
            sys.stdout.write(_HOME + text.replace("\n", f"{_CLEAR_LINE}\n") + _CLEAR_LINE + _CLEAR_BELOW)
            sys.stdout.flush()
        return 0 if last is None else _status(last)
    finally:
        sys.stdout.write(_NORMAL_SCREEN)
        sys.stdout.flush()


def _on_interrupt() -> int:
    """A file descriptor that Ctrl-C makes readable; a second Ctrl-C raises KeyboardInterrupt.

    An exception in the middle of a scrape could leave a thread of its pool that nobody ends, and the process with it.
    A pipe, because a handler may run while this thread holds the lock of any ``threading.Event``.
    """
    readable, writable = os.pipe()

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(writable, b"\0")

    signal.signal(signal.SIGINT, interrupt)
    return readable


def _status(frame: Frame) -> int:
    return 0 if any(service.is_up for service in frame.services) else 1


def _addresses(options: argparse.Namespace) -> dict[str, str]:
    """Address of the metrics of each service, by its name."""
    addresses: dict[str, str] = {}
    if options.endpoints is not None:
        path: Path = options.endpoints
        for name, one in json.loads(path.read_text().splitlines()[0]).items():
            if one["metrics"] not in addresses.values():  # else it is in another one's process
                addresses[name] = str(one["metrics"])
    addresses |= dict(options.service)
    if addresses:
        return addresses
    mesh = the_mesh(options.url, lambda mesh: mesh.router if options.url == mesh.router else mesh.metrics)
    return {"router": options.url or _ROUTER} if mesh is None else mesh.metrics_addresses()
