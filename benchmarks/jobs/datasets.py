"""Data sets of the benchmarks, drawn with fixed seeds, some of whose rows are bad on purpose."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.requests import SEED, texts

#: One row in so many is bad.
BAD_PERIOD = 500
_WIDTH = 16


def write_numbers(folder: Path, num_rows: int) -> dict[int, str]:
    """Rows for ``simple``, half in Parquet, half in JSON Lines; where the bad ones are, and what their cause must say.

    In Parquet bad rows have no value or too many; in JSON Lines also text for a number, a number that int32 does not
    hold, a line that is no JSON, and one without the column.
    """
    folder.mkdir(parents=True)
    draw = np.random.default_rng(SEED)
    first = draw.integers(-(2**30), 2**30, (num_rows, _WIDTH), dtype=np.int32)
    second = draw.integers(0, 2**30, (num_rows, _WIDTH), dtype=np.int32)
    bad = dict.fromkeys(range(BAD_PERIOD - 1, num_rows, BAD_PERIOD), "")
    middle = num_rows // 2
    parquet: list[Any] = [list(values) for values in first[:middle]]
    for place, row in enumerate(row for row in bad if row < middle):
        parquet[row], bad[row] = (
            (None, "has no value") if place % 2 else ([1] * (_WIDTH + 1), "has shape [17], which does not fit [16]")
        )
    columns = {"INPUT0": pa.array(parquet, pa.list_(pa.int32())), "INPUT1": list(second[:middle])}
    pq.write_table(pa.table(columns | {"id": range(middle)}), folder / "a.parquet", row_group_size=3000)
    lines = []
    for row in range(middle, num_rows):
        record: dict[str, Any] = {"INPUT0": first[row].tolist(), "INPUT1": second[row].tolist(), "id": row}
        line = ""
        if row in bad:
            match (row // BAD_PERIOD) % 5:
                case 0:
                    record["INPUT0"], bad[row] = ["x"] * _WIDTH, "does not fit INT32"
                case 1:
                    record["INPUT0"], bad[row] = [2**31] * _WIDTH, "which holds -2147483648 to 2147483647"
                case 2:
                    line, bad[row] = "{", "no JSON"
                case 3:
                    del record["INPUT1"]
                    bad[row] = "has no value"
                case 4:
                    record["INPUT0"], bad[row] = [1] * 1000, "has shape [1000], which does not fit [16]"
        lines.append(line or json.dumps(record))
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return bad


def write_texts(folder: Path, num_rows: int, *, has_bad_rows: bool = True, most_words: int = 60) -> dict[int, str]:
    """Texts for ``embed`` of 5 to ``most_words`` words in JSON Lines; where the bad ones are, and why."""
    folder.mkdir(parents=True)
    draw = random.Random(SEED)
    bad = dict.fromkeys(range(BAD_PERIOD // 10 - 1, num_rows, BAD_PERIOD // 10), "") if has_bad_rows else {}
    lines = []
    for row, text in enumerate(texts(num_rows)):
        words = text.split()
        value: Any = " ".join(words[: draw.randint(5, most_words)])
        if row in bad:
            value, bad[row] = [
                (7, "takes text, got 7"),
                (None, "has no value"),
                (["a", "b"], "has shape [2], which does not fit [1]"),
                ("\ud800", "is not UTF-8 text"),
            ][row // (BAD_PERIOD // 10) % 4]
        lines.append(json.dumps({"sentence": value, "id": row}))
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return bad
