"""Pairs of a query and the passage that it should find, of texts that are on every machine with Python.

A docstring of the standard library is a title and a body by convention (PEP 257): the first sentence says what the rest
explains. The title is the query and the body the passage, as in the pairs of titles and bodies that sentence encoders
are trained and judged on.
"""

import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SEED = 0
_MIN_TITLE_WORDS, _MAX_TITLE_WORDS = 4, 30
_MIN_BODY_WORDS, _MAX_BODY_WORDS = 10, 48


class Pair(NamedTuple):
    """A title, and the first words of its body."""

    query: str
    passage: str


def pairs() -> list[Pair]:
    """All pairs, no two titles or bodies alike, in an order drawn with a fixed seed."""
    sys.path.insert(0, str(ROOT / "model_repository"))
    from recipes.corpus import python_documentation  # noqa: PLC0415  # the recipes are no package of the distribution

    corpus = python_documentation()
    found: dict[str, Pair] = {}
    bodies = set()
    for text in (*corpus.training, *corpus.held_out):
        title, _, body = text.partition("\n\n")
        words = body.split()
        passage = " ".join(words[:_MAX_BODY_WORDS])
        query = " ".join(title.split())
        has_title = _MIN_TITLE_WORDS <= len(query.split()) <= _MAX_TITLE_WORDS
        if has_title and len(words) >= _MIN_BODY_WORDS and query not in found and passage not in bodies:
            found[query] = Pair(query, passage)
            bodies.add(passage)
    chosen = list(found.values())
    random.Random(_SEED).shuffle(chosen)
    return chosen


def write_pairs(path: Path) -> int:
    """``path`` is JSON Lines with ``query`` and ``passage``; how many."""
    chosen = pairs()
    path.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in chosen))
    return len(chosen)
