"""Ranks of a model whose service is on another machine: ``python -m weft.services.ranks --leader HOST:PORT``."""

import argparse
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.observing import logs
from weft.base.processes.process import describe_exit
from weft.base.text.argument_types import add, not_negative_integer, positive_integer
from weft.llm.ranks import ends

_LOG = logs.get_logger("weft.llm.ranks")
#: Pause between two attempts to connect, in seconds.
_PAUSE_S = 1.0
_CONNECT_S = 10.0


class Ranks:
    """Keeps some ranks: connects each to the service, and connects again when its process has ended."""

    def __init__(self, leader: tuple[str, int], key: bytes) -> None:
        self._leader = leader
        self._key = key
        self._is_over = threading.Event()

    def stop(self) -> None:
        """End the ranks."""
        self._is_over.set()

    def keep(self, device_index: int) -> None:
        """Keep the rank on one device until ``stop``; blocks."""
        last = ""
        while not self._is_over.is_set():
            try:
                self._run(device_index)
                last = ""
            except (OSError, EOFError, ValueError) as error:
                if (text := f"{type(error).__name__}: {error}") != last:
                    _LOG.warning("cannot be a rank of %s:%d yet: %s", *self._leader, text)
                last = text
            self._is_over.wait(_PAUSE_S)

    def _run(self, device_index: int) -> None:
        with socket.create_connection(self._leader, _CONNECT_S) as connection:
            ends.prove(connection, self._key, is_leader=False)
            ends.keep_alive(connection)
            descriptor = connection.fileno()
            command = [*ends.COMMAND, str(device_index), str(descriptor)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[descriptor])  # noqa: S603
        while process.poll() is None and not self._is_over.wait(_PAUSE_S / 4):
            pass
        process.kill()
        _LOG.info("the rank on device %d %s", device_index, describe_exit(process.wait()))


def main(argv: Sequence[str] | None = None) -> int:
    """Keep ranks until a signal; returns 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="weft.services.ranks", description="Compute ranks of a language model for a service on another machine."
    )
    add(parser, "--leader HOST:PORT", "rank_listen_address of the model, as this machine reaches it", required=True)
    add(
        parser,
        "--key-file FILE",
        "the model's rank_key_file: the first line is the secret that both have",
        Path,
        required=True,
    )
    add(parser, "--num-ranks N (1)", "ranks on this machine", positive_integer)
    add(parser, "--first-device I (0)", "GPU of the first of them", not_negative_integer)
    options = parser.parse_args(argv)
    logs.configure(service="ranks")
    try:
        ranks = Ranks(ends.split_address(options.leader), ends.read_key(options.key_file))
    except InvalidArgumentError as error:
        print(f"weft.services.ranks: error: {error.message}", file=sys.__stderr__)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ranks.stop())
    devices = range(options.first_device, options.first_device + options.num_ranks)
    threads = [threading.Thread(target=ranks.keep, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
