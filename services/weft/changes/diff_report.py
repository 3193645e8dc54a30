"""A difference as text, Markdown for a pull request, and JSON."""

import json
import re
from collections.abc import Sequence

from weft.changes.diff import Section


def text_of(before: str, after: str, found: Sequence[Section]) -> str:
    """For a terminal."""
    if not any(one.classes for one in found):
        return f"{before} -> {after}: no difference\n"
    parts = [[f"{one.title}: {one.headline}", *(f"  {line}" for line in one.lines)] for one in found]
    return "\n".join([f"{before} -> {after}", *(line for part in parts for line in part)]) + "\n"


def markdown_of(before: str, after: str, found: Sequence[Section]) -> str:
    """For a pull request: a table, and the changes folded below it, in the colours of ``diff`` blocks."""
    rows = [f"| {one.title} | {_escaped(one.headline)} |" for one in found]
    lines = [f"### {_escaped(f'{before} -> {after}')}", "", "| | |", "|---|---|", *rows, ""]
    for one in (one for one in found if one.lines):
        body = [f"!{line[1:]}" if line.startswith("~") else line for line in one.lines]
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`*", "\n".join(body))))
        lines += [f"<details><summary>{one.title}</summary>", "", f"{fence}diff", *body, fence, "", "</details>", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]&#])", r"\\\1", " ".join(text.split()))


def json_of(before: str, after: str, found: Sequence[Section]) -> str:
    """As one object."""
    classes = sorted({name for one in found for name in one.classes})
    facts = {one.title.replace(" ", "_"): one.facts for one in found}
    return json.dumps({"before": before, "after": after, "classes": classes, **facts}, indent=2) + "\n"
