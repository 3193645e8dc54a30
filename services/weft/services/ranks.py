"""Ranks of a model whose service is on another machine: ``python -m weft.services.ranks --leader HOST:PORT``."""

import argparse
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.observing import logs
from weft.base.processes.process import describe_exit
from weft.base.text.argument_types import add, not_negative_integer, positive_integer
from weft.llm.ranks import ends

_LOG = logs.get_logger("weft.llm.ranks")
#: Pause between two attempts to connect, and longest attempt, in seconds.
_PAUSE_S, _CONNECT_S = 1.0, 10.0


def keep(device: int, leader: tuple[str, int], key: bytes, is_over: threading.Event) -> None:
    """Be a rank of the service, and again when that process has ended, until ``is_over``; blocks."""
    last = ""
    while not is_over.wait(_PAUSE_S if last else 0.0):
        try:
            with socket.create_connection(leader, _CONNECT_S) as link:
                ends.prove(link, key, is_leader=False)
                process = subprocess.Popen(  # noqa: S603  # our own module
                    [*ends.COMMAND, str(device), str(link.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[link.fileno()],
                )
        except (OSError, ValueError) as error:
            if last != (last := str(error)):
                _LOG.warning("cannot be a rank of %s:%d yet: %s", *leader, error)
            continue
        while process.poll() is None and not is_over.wait(0.2):
            pass
        process.kill()
        last = describe_exit(process.wait())
        _LOG.info("the rank on device %d %s", device, last)


def main(argv: Sequence[str] | None = None) -> int:
    """Keep ranks until a signal; returns 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="weft.services.ranks", description="Compute ranks of a language model for a service on another machine."
    )
    add(parser, "--leader HOST:PORT", "rank_listen_address of the model, as this machine reaches it", required=True)
    add(parser, "--key-file FILE", "the model's rank_key_file: its first line is the secret", Path, required=True)
    add(parser, "--num-ranks N (1)", "ranks on this machine", positive_integer)
    add(parser, "--first-device I (0)", "GPU of the first of them", not_negative_integer)
    options = parser.parse_args(argv)
    logs.configure(service="ranks")
    is_over = threading.Event()
    try:
        leader, key = ends.split_address(options.leader), ends.read_key(options.key_file)
    except InvalidArgumentError as error:
        print(f"weft.services.ranks: error: {error.message}", file=sys.__stderr__)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_over.set())
    devices = range(options.first_device, options.first_device + options.num_ranks)
    threads = [threading.Thread(target=partial(keep, device, leader, key, is_over)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
