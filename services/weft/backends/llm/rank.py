"""The program of a rank: ``python -m weft.backends.llm.rank DEVICE_INDEX CONNECTION``, which the service starts.

The arguments are the index of its GPU, if the model is on one, and the file descriptor of its connection to the
service, which tells it the rest. It ends when that connection does, whatever it is doing.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from weft import __version__
from weft.backends.llm.parts import LoadedPart, load_part, resolve
from weft.backends.llm.settings import Settings
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing import logs
from weft.base.observing.settings import LOG
from weft.llm.config import EngineConfig
from weft.llm.models.registry import read_config
from weft.llm.parallel.groups import Groups, join
from weft.llm.parallel.topology import ParallelSizes, Place
from weft.llm.ranks import ends
from weft.llm.ranks.codec import pack, unpack
from weft.llm.runner import StepTokens

_LOG = logs.get_logger("weft.llm.ranks")
#: Shortest time between two messages of statistics, and how long after the last step the rest is sent, in seconds.
_STATS_S = 1.0


def part_of(directory: Path, settings: Settings, dtype: str) -> dict[str, Any]:
    """What the ranks of a model that computes in ``dtype`` are told of it, as JSON has it."""
    return {
        "version": __version__,
        "directory": str(directory.resolve()),
        "engine": asdict(replace(settings.engine, dtype=dtype)),
        "has_weights": settings.has_weights,
    }


class _Rank:
    """Loads a rank's part and runs its steps; one thread, but for the end of the connection and for adapters."""

    def __init__(self, connection: Connection, device_index: int) -> None:
        self._connection = connection
        self._device_index = device_index
        self._sending = threading.Lock()
        self._num_steps, self._steps_s, self._stats_s = 0, 0.0, 0.0
        self._is_told = True
        self._results: SimpleQueue[tuple[Callable[[], StepTokens], bool, float]] = SimpleQueue()

    def run(self) -> None:
        """Load, then serve; does not return."""
        begin = self._receive_json()
        logs.configure(**begin["log"], fields={"rank": begin["rank"]})
        try:
            part = self._load(begin)
        except Exception as error:
            failure = error
            if not isinstance(error, WeftError):
                failure = InternalError(f"rank {begin['rank']} failed to load")
                _LOG.exception(failure.message)
            self._send_json(ends.FAILED, _fields_of(failure))
            signal.pause()  # the service ends it
        self._serve(part)

    def _load(self, begin: Mapping[str, Any]) -> LoadedPart:
        if begin["version"] != __version__:
            raise InvalidArgumentError(
                f"a rank must have the service's version {begin['version']}, got {__version__}; use the same image"
            )
        config = EngineConfig(**begin["engine"])
        if config.device != "cpu":
            config = replace(config, device=f"cuda:{self._device_index}")
        sizes = ParallelSizes(*begin["sizes"])
        place = Place.of(begin["rank"], sizes)
        self._is_reporter = place == Place(0, sizes.pipeline - 1, 0)
        groups = self._join(begin, sizes, config.device)
        directory = Path(begin["directory"])
        settings = Settings(config, 0, begin["has_weights"])
        model_config = read_config(directory)
        config, draft_config = resolve(directory, settings, model_config)
        self._plans_ahead = config.plans_ahead
        part = load_part(directory, settings, model_config, config, draft_config, groups, self._agree)
        part.runner.bind_thread()
        self._send_json(
            ends.REPLY,
            {
                "num_blocks": part.runner.num_blocks,
                "num_offload_blocks": part.runner.num_offload_blocks,
                "weight_bytes": part.model.matrix_bytes,
                "kv_bytes": part.runner.kv.nbytes,
            },
        )
        return part

    def _join(self, begin: Mapping[str, Any], sizes: ParallelSizes, device: str) -> Groups:
        """Meet the other ranks at the store, which the first one has."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            host = "127.0.0.1" if own.family == socket.AF_UNIX else own.getpeername()[0]
        if "listen" in begin:
            address = ends.split_address(begin["listen"])[0] if begin["listen"] else "127.0.0.1"
            server = socket.create_server((address, 0), family=ends.family_of(address))
            port = server.getsockname()[1]
            options = {"is_master": True, "master_listen_fd": server.detach()}
            self._send_json(ends.REPLY, {"port": port})
        else:
            port, options = begin["port"], {"is_master": False}
        store = dist.TCPStore(host, port, wait_for_workers=False, **options)
        return join(begin["rank"], sizes, store, device=device, timeout_s=begin["timeout_s"])

    def _agree(self, number: int) -> tuple[int, int]:
        self._send_json(ends.REPLY, {"number": number})
        least, most = self._receive_json()
        return least, most

    def _serve(self, part: LoadedPart) -> None:
        if self._plans_ahead:
            threading.Thread(target=self._answer_all, daemon=True).start()
        while True:
            if not self._is_told and not self._connection.poll(_STATS_S):
                self._tell()
            message = self._connection.recv_bytes(ends.MAX_BYTES)
            if message[:1] == ends.PLAN:
                start_s = time.perf_counter()
                plan = unpack(memoryview(message)[1:])
                answers = self._is_reporter or plan.transfers is not None
                if self._plans_ahead:
                    self._results.put((part.runner.launch(plan), answers, start_s))
                else:
                    self._answer(part.runner.run(plan), answers, start_s)
            elif message[:1] == ends.ADAPT:
                threading.Thread(target=self._adapt, args=(part, json.loads(message[1:])), daemon=True).start()
            else:
                LOG.update(json.loads(message[1:]))

    def _answer_all(self) -> None:
        """Await the steps that were launched, one after the other."""
        try:
            while True:
                collect, answers, start_s = self._results.get()
                self._answer(collect(), answers, start_s)
        except BaseException:
            _end(1)

    def _answer(self, tokens: StepTokens, answers: bool, start_s: float) -> None:
        if answers:
            self._send(ends.TOKENS + pack(tokens))
        now_s = time.perf_counter()
        self._num_steps += 1
        self._steps_s += now_s - start_s
        self._is_told = False
        if now_s - self._stats_s >= _STATS_S:
            self._tell()

    def _tell(self) -> None:
        self._is_told, self._stats_s = True, time.perf_counter()
        stats = {"num_steps": self._num_steps, "steps_s": self._steps_s, "rss_bytes": _rss_bytes()}
        self._send_json(ends.STATS, stats)

    def _adapt(self, part: LoadedPart, told: Mapping[str, Any]) -> None:
        reply = {}
        try:
            if part.model.lora is not None:
                part.model.lora.write(told["slot"], Path(told["folder"]))
        except Exception as error:
            _LOG.exception("the adapter in %s cannot be read", told["folder"])
            reply = _fields_of(error)
        self._send_json(ends.REPLY, reply)

    def _send_json(self, kind: bytes, value: Mapping[str, Any]) -> None:
        self._send(kind + json.dumps(value).encode())

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(message)

    def _receive_json(self) -> Any:
        return json.loads(self._connection.recv_bytes(ends.MAX_BYTES)[1:])


def _rss_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _fields_of(error: Exception) -> dict[str, str]:
    code, message = (error.code, error.message) if isinstance(error, WeftError) else ("INTERNAL", "see its log")
    return {"code": code, "message": message}


def _end_with_service(descriptor: int) -> None:
    """End the process when the service has hung up, also in the middle of a step that waits for other ranks."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    _end(0)


def _end(status: int) -> None:
    if status:
        _LOG.critical("the rank ends", exc_info=sys.exc_info()[1])
    logs.flush()
    os._exit(status)  # others may hold it up that it waits for


def main(argv: Sequence[str]) -> None:
    """Run a rank to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when this process ends
    device_index, descriptor = map(int, argv)
    threading.Thread(target=_end_with_service, args=(descriptor,), daemon=True).start()
    try:
        _Rank(Connection(descriptor), device_index).run()
    except EOFError:
        _end(0)
    except BaseException:
        _end(1)


if __name__ == "__main__":
    main(sys.argv[1:])
