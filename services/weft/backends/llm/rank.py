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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from weft import __version__
from weft.backends.llm.parts import load_part, resolve
from weft.backends.llm.settings import Settings
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing import logs
from weft.llm.config import EngineConfig
from weft.llm.models.lora import LoraBank
from weft.llm.models.registry import read_config
from weft.llm.parallel.groups import Groups, join
from weft.llm.ranks import ends
from weft.llm.ranks.codec import pack, unpack
from weft.llm.runner import ModelRunner, StepTokens

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
    """Loads a rank's part and runs its steps."""

    def __init__(self, connection: Connection, device_index: int) -> None:
        self._connection = connection
        self._device_index = device_index
        self._sending = threading.Lock()
        self._num_steps, self._steps_s, self._stats_s = 0, 0.0, 0.0
        self._is_told, self._answers = True, False
        self._launched: SimpleQueue[tuple[Callable[[], StepTokens], float]] = SimpleQueue()

    def run(self) -> None:
        """Load, then serve; does not return."""
        begin = json.loads(self._connection.recv_bytes(ends.MAX_BYTES))
        logs.configure(**begin["log"], fields={"rank": begin["rank"]})
        try:
            runner, lora, plans_ahead = self._load(begin)
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, WeftError):
                _LOG.exception("rank %d failed to load", begin["rank"])
            self._send_json(ends.FAILED, _fields_of(error))
            signal.pause()  # the service ends it
        self._answers = begin["answers"]
        self._serve(runner, lora, plans_ahead=plans_ahead)

    def _load(self, begin: Mapping[str, Any]) -> tuple[ModelRunner, LoraBank | None, bool]:
        if begin["version"] != __version__:
            raise InvalidArgumentError(
                f"a rank must have the service's version {begin['version']}, got {__version__}; use the same image"
            )
        config = EngineConfig(**begin["engine"])
        if config.device != "cpu":
            config = replace(config, device=f"cuda:{self._device_index}")
        groups = self._join(begin, config)
        directory, settings = Path(begin["directory"]), Settings(config, 0, begin["has_weights"])
        model_config = read_config(directory)
        config, draft_config = resolve(directory, settings, model_config)
        model, runner = load_part(directory, settings, model_config, config, draft_config, groups)
        runner.bind_thread()
        told = {
            "num_blocks": runner.num_blocks,
            "num_offload_blocks": runner.num_offload_blocks,
            "weight_bytes": model.matrix_bytes,
            "kv_bytes": runner.kv.nbytes,
        }
        self._send_json(ends.REPLY, told)
        return runner, model.lora, config.plans_ahead

    def _join(self, begin: Mapping[str, Any], config: EngineConfig) -> Groups:
        """Meet the other ranks at the store, which the first one has."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            host = begin["host"] if own.family == socket.AF_UNIX else own.getpeername()[0]
        options = {"is_master": True, "master_listen_fd": begin["store"]} if begin["rank"] == 0 else {}
        store = dist.TCPStore(host, begin["port"], wait_for_workers=False, **options)
        return join(begin["rank"], config.parallel_sizes, store, device=config.device, timeout_s=config.rank_timeout_s)

    def _serve(self, runner: ModelRunner, lora: LoraBank | None, *, plans_ahead: bool) -> None:
        if plans_ahead:
            threading.Thread(target=_or_end, args=(self._collect_all,), daemon=True).start()
        while True:
            if not self._is_told and not self._connection.poll(_STATS_S):
                self._tell()
            message = memoryview(self._connection.recv_bytes(ends.MAX_BYTES))
            if message[:1] == ends.ADAPT:
                threading.Thread(target=self._adapt, args=(lora, json.loads(bytes(message[1:]))), daemon=True).start()
                continue
            start_s = time.perf_counter()
            plan = unpack(message[1:])
            if plans_ahead:
                self._launched.put((runner.launch(plan), start_s))
            else:
                self._end_step(partial(runner.run, plan), start_s)

    def _collect_all(self) -> None:
        """Await the steps that were launched, one after the other."""
        while True:
            self._end_step(*self._launched.get())

    def _end_step(self, collect: Callable[[], StepTokens], start_s: float) -> None:
        tokens = collect()
        if self._answers:
            self._send(ends.TOKENS + pack(tokens))
        now_s = time.perf_counter()
        self._num_steps, self._steps_s, self._is_told = self._num_steps + 1, self._steps_s + now_s - start_s, False
        if now_s - self._stats_s >= _STATS_S:
            self._tell()

    def _tell(self) -> None:
        self._is_told, self._stats_s = True, time.perf_counter()
        pages = Path("/proc/self/statm").read_text().split()[1] if sys.platform == "linux" else 0
        rss_bytes = int(pages) * os.sysconf("SC_PAGE_SIZE")
        self._send_json(ends.STATS, {"num_steps": self._num_steps, "steps_s": self._steps_s, "rss_bytes": rss_bytes})

    def _adapt(self, lora: LoraBank | None, told: Mapping[str, Any]) -> None:
        reply = {}
        try:
            if lora is not None:
                lora.write(told["slot"], Path(told["folder"]))
        except Exception as error:
            if not isinstance(error, WeftError):
                _LOG.exception("the adapter in %s cannot be read", told["folder"])
            reply = _fields_of(error)
        self._send_json(ends.REPLY, reply)

    def _send_json(self, kind: bytes, value: Mapping[str, Any]) -> None:
        self._send(kind + json.dumps(value).encode())

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(message)


def _fields_of(error: Exception) -> dict[str, str]:
    if isinstance(error, WeftError):
        return {"code": error.code, "message": error.message}
    return {"code": InternalError.code, "message": "a rank failed; its log says why"}


def _or_end(run: Callable[[], None]) -> None:
    """Call ``run``, and end the process with what it raises: others wait for this rank, or have hung up."""
    try:
        run()
    except (EOFError, ConnectionError):
        status = 0
    except BaseException:
        _LOG.critical("the rank has failed, and ends", exc_info=True)
        status = 1
    else:
        status = 0
    logs.flush()
    os._exit(status)


def main(argv: Sequence[str]) -> None:
    """Run a rank to its end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the service decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    device_index, descriptor = map(int, argv)
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    threading.Thread(target=_or_end, args=(poll.poll,), daemon=True).start()  # also in the middle of a step
    _or_end(_Rank(Connection(descriptor), device_index).run)


if __name__ == "__main__":
    main(sys.argv[1:])
