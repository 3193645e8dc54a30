"""Rows of token ids from a user's text: some to calibrate with, others held out to measure with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from weft.backends.llm.text import TextCodec
from weft.base.errors import InvalidArgumentError, NotFoundError

_JSONL = ".jsonl"
_MAX_ROW_TOKENS, _MIN_ROW_TOKENS, _MIN_ROWS = 512, 16, 8
#: Rows that are used at most, for each of the two purposes.
_MAX_CALIBRATION_ROWS, _MAX_HELD_OUT_ROWS = 128, 64
_HELD_OUT_SHARE = 0.2
#: Tokenizing takes about 40 bytes of memory for each byte of text.
_MAX_DATA_BYTES = 2**26


class TextRows(NamedTuple):
    """Token ids, int64, rows of up to 512.

    Attributes:
        calibration: What a method may look at.
        held_out: What it may not, from the end of the data.
    """

    calibration: list[torch.Tensor]
    held_out: list[torch.Tensor]


def read_rows(data: Path, folder: Path, max_row_tokens: int) -> TextRows:
    """Tokenize the data with the tokenizer of the folder.

    Args:
        data: UTF-8 text, or ``.jsonl`` with a text, or an object with ``text``, on each line.
        folder: Has ``tokenizer.json``.
        max_row_tokens: What the model takes at most.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: The data is no text, too short or larger than 64 MiB.
        OSError: A file cannot be read.
    """
    if not data.is_file():
        raise NotFoundError(f"no file {data}; --data takes a text, or {_JSONL} with 'text' on each line")
    if (num_bytes := data.stat().st_size) > _MAX_DATA_BYTES:
        raise InvalidArgumentError(
            f"{data} must have at most {_MAX_DATA_BYTES} bytes, got {num_bytes}; give a part of it: at most "
            f"{(_MAX_CALIBRATION_ROWS + _MAX_HELD_OUT_ROWS) * _MAX_ROW_TOKENS} tokens are used"
        )
    content = data.read_bytes()
    codec = TextCodec.from_folder(folder, max(1, len(content)))
    if codec is None:
        raise NotFoundError(f"no tokenizer.json in {folder}; put the model's there")
    texts = list(_lines(data, content)) if data.suffix == _JSONL else [content]
    ids = [
        torch.from_numpy(
            codec.ids(text, str(data), adds_special_tokens=False, parses_special_tokens=False)[1].astype("int64")
        )
        for text in texts
    ]
    num_tokens = sum(len(each) for each in ids)
    size = min(_MAX_ROW_TOKENS, max_row_tokens, max(_MIN_ROW_TOKENS, num_tokens // _MIN_ROWS))
    rows = [row for each in ids for row in each.split(size) if len(row) >= _MIN_ROW_TOKENS]
    if len(rows) < _MIN_ROWS // 2:
        raise InvalidArgumentError(
            f"{data} must have at least {_MIN_ROWS // 2} rows of {_MIN_ROW_TOKENS} tokens, got {num_tokens} tokens in "
            f"{len(texts)} texts; give more text, like that which the model is for"
        )
    num_held_out = max(1, min(int(len(rows) * _HELD_OUT_SHARE), _MAX_HELD_OUT_ROWS))
    return TextRows(rows[: min(len(rows) - num_held_out, _MAX_CALIBRATION_ROWS)], rows[-num_held_out:])


def _lines(data: Path, content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{data}, line {number} is not JSON: {error}") from error
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InvalidArgumentError(
                f"{data}, line {number} must be a text, or an object with 'text', got {line[:80]!r}"
            )
        yield text.encode("utf-8", "replace")
