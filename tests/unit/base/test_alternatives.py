"""A regular expression for any of many texts."""

import random
import re
import time

from weft.base.text.suggestion import any_of


def test_it_finds_what_alternatives_side_by_side_find() -> None:
    """Random texts, the longest first; nothing matches where there is none."""
    rng = random.Random(1)
    for _ in range(300):
        texts = {"".join(rng.choices("ab<|.", k=rng.randrange(5))) for _ in range(rng.randrange(8))}
        where = "".join(rng.choices("ab<|.", k=40))
        plain = "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or "(?!)"
        assert re.findall(plain, where) == re.findall(any_of(texts), where)


def test_what_begins_like_hundreds_of_texts_is_scanned_once() -> None:
    """A megabyte that begins them everywhere takes a fraction of what so many alternatives take."""
    texts = {"<s>", "</s>", *(f"<|reserved_special_token_{number}|>" for number in range(250))}
    where = "<|" * 500_000

    def cpu_s(pattern: str) -> float:
        start_s = time.process_time()
        assert re.search(pattern, where) is None
        return time.process_time() - start_s

    assert 3 * cpu_s(any_of(texts)) < cpu_s("|".join(map(re.escape, texts)))
