"""One event, one JSON line."""

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from weft.base.observing.console import Console
from weft.base.observing.logs import LineFormatter, LineWriter, LogLimit, get_logger


def line_of(level=logging.INFO, message="done %s", args=("x",), extra=None, exc_info=None):
    """The formatted line of one record."""
    record = get_logger("weft.test").makeRecord("weft.test", level, "f", 1, message, args, exc_info, extra=extra)
    return LineFormatter("model").format(record)


def test_line_has_the_standard_fields():
    """Time in UTC, level, service, process, logger and the finished message."""
    line = json.loads(line_of())
    expected = {"level": "info", "service": "model", "pid": os.getpid(), "logger": "weft.test", "message": "done x"}
    assert expected.items() <= line.items()
    assert line["time"].endswith("+00:00")
    assert 6 == len(line)


def test_extra_becomes_fields():
    """What the caller passes in ``extra`` is in the line; values JSON does not know are written as text."""
    line = json.loads(line_of(extra={"trace_id": "ab", "grace_s": 1.5, "where": ValueError("v")}))
    assert ("ab", 1.5, "v") == (line["trace_id"], line["grace_s"], line["where"])


@pytest.mark.parametrize("message", ["two\nlines", "ü", '"quoted"', "nul \x00"])
def test_any_text_is_one_line(message):
    """No text of a client can break a line in two or forge another."""
    text = line_of(message=message, args=())
    assert 1 == len(text.splitlines())
    assert message == json.loads(text)["message"]


def test_exception_is_in_the_line():
    """The traceback is a field of the same line."""
    try:
        raise ValueError("cause")
    except ValueError:
        text = line_of(exc_info=sys.exc_info())
    assert 1 == len(text.splitlines())
    assert "ValueError: cause" in json.loads(text)["exception"]


EVERYTHING = """
import asyncio, sys, threading, warnings
from weft.base.observing import logs

logs.configure()
print("printed", end=" ")
print("in two parts\\nand a second line")
sys.stderr.write("to stderr\\n")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()

async def main():
    asyncio.get_running_loop().call_exception_handler({"message": "asyncio complains"})

asyncio.run(main())
raise ValueError("the end")
"""


def test_everything_that_python_says_is_a_json_line():
    """Prints, warnings, asyncio's complaints and uncaught exceptions, of threads too; the exit status is as ever."""
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, timeout=60, check=False)
    assert (1, "") == (done.returncode, done.stdout)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [(line["logger"], line["message"]) for line in lines]
    assert [("stdout", "printed in two parts"), ("stdout", "and a second line"), ("stderr", "to stderr")] == said[:3]
    assert "a warning" in said[3][1]
    assert [("weft.uncaught", "uncaught exception in a thread"), ("asyncio", "asyncio complains")] == said[4:6]
    assert "ZeroDivisionError" in lines[4]["exception"]
    assert "ValueError: the end" in lines[6]["exception"]


def test_lines_that_nobody_reads_are_dropped_and_counted():
    """Writing never waits; when the reader comes back it gets what was kept, whole, and then how many are missing."""
    reader, fd = os.pipe()
    writer = LineWriter(fd, "{} are missing".format, max_waiting_bytes=300_000)
    for number in range(1000):
        writer.write(f"{number} " + "x" * 994)
    assert writer.num_dropped > 500
    assert not writer.flush(0.05)
    read = b""
    while b"missing\n" not in read:
        read += os.read(reader, 1 << 16)
    lines = read.decode().splitlines()
    assert f"{writer.num_dropped} are missing" == lines[-1]
    kept = [int(line.split()[0]) for line in lines[:-1]]
    assert 1000 - writer.num_dropped == len(kept)
    assert sorted(set(kept)) == kept
    assert all(line.endswith(" " + "x" * 994) for line in lines[:-1])
    assert {994} == {line.count("x") for line in lines[:-1]}
    os.close(reader)
    writer.write("the reader is gone for good")
    writer.flush()
    assert writer.num_dropped > 500


def test_a_full_disk_stops_nothing():
    """Lines that cannot be written are counted; nobody waits for them."""
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(fd, "{} are missing".format)
    writer.write("one")
    assert writer.flush(5)
    assert 1 == writer.num_dropped


FORKS = """
import os
from weft.base.observing import logs

logs.configure()
log = logs.get_logger("weft.test")
log.info("parent")
writer = log.root.handlers[0].writer
with writer._changed:  # as the thread that writes may hold it
    child = os.fork()
    if child == 0:
        log.info("child")
        logs.flush()
        os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_logs_too():
    """As models that use multiprocessing do: it has no writing thread and a lock that nobody gives back."""
    done = subprocess.run([sys.executable, "-c", FORKS], stderr=subprocess.PIPE, text=True, timeout=30, check=True)
    assert ["parent", "child"] == [json.loads(line)["message"] for line in done.stderr.splitlines()]


def record(line: int, level: int = logging.WARNING, *, name: str = "weft.x", has_traceback: bool = False) -> Any:
    """A record of a place in the code."""
    error = (ValueError, ValueError("x"), None) if has_traceback else None
    return logging.LogRecord(name, level, "/file.py", line, "client %s sent junk", (line,), error)


def test_a_place_that_logs_too_much_is_counted():
    """The first 100 lines of a place in a minute are whole, 10 with a traceback; then one line says how many more."""
    now_s = 0.0
    limit = LogLimit(lambda: now_s, frozenset({"stdout"}))
    assert 100 == sum(limit.admits(record(1)) for _ in range(34_000))
    assert 10 == sum(limit.admits(record(2, logging.ERROR, has_traceback=True)) for _ in range(500))
    assert 1000 == sum(limit.admits(record(3, logging.INFO)) for _ in range(1_000))
    assert limit.admits(record(4))
    assert all(limit.admits(record(5, name="stdout")) for _ in range(1_000))
    assert [] == list(limit.counts())
    now_s = 60.0
    counted = {told.lineno: number for told, number in limit.counts()}
    assert {1: 33_900, 2: 490} == counted
    assert limit.admits(record(1))


def test_a_flood_of_lines_is_a_hundred_and_a_count():
    """A process that logs 5,000 lines from one place writes 101 to standard error; its last one has the number."""
    program = (
        "import logging\nfrom weft.base.observing import logs\nlogs.configure()\n"
        "for n in range(5_000): logging.getLogger('weft.x').warning('connection %d sent junk', n)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert 101 == len(lines)
    assert "4900 more lines like this one within a minute: connection 4999 sent junk" == lines[-1]["message"]


FORWARDED = """
import sys
from weft.base.observing import logs
from weft.base.observing.settings import LOG

logs.configure(service="weft")
plain = "2026-01-02T03:04:05+0000 7 ERROR weft.x: bad"
for line in ('{"logger": [], "message": {"a": 1}}', '{"a":' * 100000, "{", plain):
    logs.forward(line, "model", 5)
logs.flush()
LOG.update(dict.fromkeys(("log_error", "log_warning", "log_info"), False))
logs.configure(**logs.settings())
LOG.update({"log_error": True, "log_format": "ISO8601"})
logs.get_logger("weft.x").error("as text")
"""


def test_lines_of_other_processes_are_passed_on_whatever_they_are():
    """No line stops the reader; a line of the format ISO8601 keeps its level. A child starts with every level off."""
    process = subprocess.run([sys.executable, "-c", FORWARDED], capture_output=True, text=True, check=True)
    *lines, plain = process.stderr.splitlines()
    found = [json.loads(line) for line in lines]
    assert [[], "output", "output", "weft.x"] == [line["logger"] for line in found]
    assert {"level": "error", "pid": 7, "service": "model", "message": "bad"}.items() <= found[3].items()
    assert plain.endswith(" ERROR weft.x: as text")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"model": "a"}, "  model=a"),  # no word of the message
        ({"model": "loaded"}, ""),
        ({"request_id": "1\nweft | forged"}, "  request_id=1\\nweft | forged"),
        ({"logger": []}, ""),
    ],
)
def test_a_line_for_people_has_the_fields_that_its_message_lacks(fields, shown):
    """Each field is within the one line; it is left out only where the message has the very word."""
    text = Console(is_coloured=False).text({"service": "model", "level": "info", "message": "was loaded", **fields})
    assert text.endswith("INFO    was loaded" + shown)
