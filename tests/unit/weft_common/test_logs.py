"""One event, one JSON line."""

import json
import logging
import sys

import pytest

from weft_common.logs import JsonFormatter, get_logger


def line_of(level=logging.INFO, message="done %s", args=("x",), extra=None, exc_info=None):
    """The formatted line of one record."""
    record = get_logger("weft.test").makeRecord("weft.test", level, "f", 1, message, args, exc_info, extra=extra)
    return JsonFormatter().format(record)


def test_line_has_the_standard_fields():
    """Time in UTC, level, logger and the finished message."""
    line = json.loads(line_of())
    assert {"level": "info", "logger": "weft.test", "message": "done x"}.items() <= line.items()
    assert line["time"].endswith("+00:00")
    assert 4 == len(line)


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
