"""The response parameter ``graph_trace`` as a tree: what each step did, when, and for how long."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_ROOT = re.compile(r"[^/\[]+")
_SKIPPED = "SKIPPED"

#: Text and the name of its style -> the text as it is printed.
Paint = Callable[[str, str], str]
_ANSI = {"bad": "31", "late": "33", "faint": "2", "bar": "36"}


def painter(*, is_coloured: bool) -> Paint:
    """Styles "bad", "late", "faint" and "bar" as ANSI colours, or nothing at all."""
    if not is_coloured:
        return lambda text, _: text
    return lambda text, style: f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if text and style else text


def read_trace(text: str) -> list[Mapping[str, Any]]:
    """The entries of ``graph_trace``; anything else is left out, so that the answer of any server can be shown."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [e for e in entries if isinstance(e, dict) and e.get("path")] if isinstance(entries, list) else []


def span_ms(entries: Sequence[Mapping[str, Any]]) -> float:
    """From the start of the graph to the end of the last step, milliseconds."""
    return max((_number(e, "start_ms") + _number(e, "ms") for e in entries), default=0.0)


@dataclass(slots=True)
class _Branch:
    label: str
    path: str
    entry: Mapping[str, Any]
    children: list["_Branch"] = field(default_factory=list)


def render_trace(entries: Sequence[Mapping[str, Any]], paint: Paint | None = None) -> str:
    """Entries as a tree: milliseconds, a bar in the graph's time, model, and whatever is not as usual.

    Args:
        entries: Objects with ``path`` ("root/clf/by_language[de]") and, where known, ``start_ms``, ``ms``, ``model``,
            ``version``, ``target``, ``status``, ``attempts``, ``cached``, ``rows``, ``fallback_of`` and ``error``. The
            steps of a node follow the step that ran it; a path that occurs again is another round of a loop.
        paint: Colours; None: none.
    """
    paint = paint or painter(is_coloured=False)
    total_ms = span_ms(entries)
    has_times = any("start_ms" in entry for entry in entries)
    lines = [line for root in _tree(entries) for line in _lines(root, "", "")]
    width = max((len(left) for left, _, _ in lines), default=0)
    shown = []
    for left, below, branch in lines:
        bar = _bar(branch.entry, total_ms, paint) if has_times else ""
        shown.append(f"{left:<{width}}  {_time(branch.entry)}  {bar}{_what(branch.entry, paint)}".rstrip())
        if branch.entry.get("error"):
            shown.append(below + paint(_printable(branch.entry["error"]), "bad"))
    return "\n".join(shown)


def _tree(entries: Sequence[Mapping[str, Any]]) -> list[_Branch]:
    roots: dict[str, _Branch] = {}
    latest: dict[str, _Branch] = {}
    rounds: dict[tuple[int, str], int] = {}
    for entry in entries:
        path = str(entry["path"])
        parent = latest.get(str(entry.get("fallback_of", ""))) or _around(path, latest)
        if parent is None:
            name = match[0] if (match := _ROOT.match(path)) else path
            if name == path:
                roots[name] = latest[path] = _Branch(_printable(path), path, entry)
                continue
            parent = roots.setdefault(name, _Branch(_printable(name), name, {}))
        label = path.removeprefix(parent.path).lstrip("/") if path.startswith(parent.path) else path
        if "fallback_of" in entry:
            label = f"or {label.lstrip('>')}"
        number = rounds[id(parent), label] = rounds.get((id(parent), label), 0) + 1
        shown = _printable(label) + (f" (round {number})" if number > 1 else "")
        latest[path] = branch = _Branch(shown, path, entry)
        parent.children.append(branch)
    return list(roots.values())


def _around(path: str, latest: Mapping[str, _Branch]) -> _Branch | None:
    """The step that ran the node of this step: the longest path that ends before a "/"."""
    end = path.rfind("/")
    while end > 0:
        if found := latest.get(path[:end]):
            return found
        end = path.rfind("/", 0, end)
    return None


def _lines(branch: _Branch, first: str, rest: str) -> Iterator[tuple[str, str, _Branch]]:
    """(start of the line, start of a line below it, branch) of a branch and all under it."""
    below = rest + ("│  " if branch.children else "   ")
    yield first + branch.label, below, branch
    for number, child in enumerate(branch.children, start=1):
        is_last = number == len(branch.children)
        yield from _lines(child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))


def _time(entry: Mapping[str, Any]) -> str:
    has_run = isinstance(entry.get("ms"), (int, float)) and entry.get("status") != _SKIPPED
    return f"{entry['ms']:9.2f} ms" if has_run else " " * 12


def _bar(entry: Mapping[str, Any], total_ms: float, paint: Paint) -> str:
    """When the step ran: a bar on a line that stands for the time of the whole graph."""
    if not entry or entry.get("status") == _SKIPPED or total_ms <= 0:
        return " " * (BAR_WIDTH + 2)
    start = min(_number(entry, "start_ms") / total_ms, 1.0) * BAR_WIDTH
    offset = min(int(start), BAR_WIDTH - 1)
    eighths = max(1, round(_number(entry, "ms") / total_ms * BAR_WIDTH * 8))
    full, part = divmod(min(eighths, (BAR_WIDTH - offset) * 8), 8)
    drawn = "█" * full + (_EIGHTHS[part] if part else "")
    return " " * offset + paint(drawn, "bar") + " " * (BAR_WIDTH - offset - len(drawn) + 2)


def _what(entry: Mapping[str, Any], paint: Paint) -> str:
    """Model and target, then what is not as usual."""
    model = _printable(entry.get("model") or "")
    if model and entry.get("version"):
        model += f"@{_printable(entry['version'])}"
    if entry.get("target"):
        model += f" on {_printable(entry['target'])}"
    status = _printable(entry.get("status") or "")
    attempts, rows = _number(entry, "attempts"), _number(entry, "rows")
    notes = [
        "" if status == "OK" else paint(status.lower() if status == _SKIPPED else status, _style(status)),
        f"{attempts:g} attempts" if attempts > 1 else "",
        "cached" if entry.get("cached") is True else "",
        f"{rows:g} row{'' if rows == 1 else 's'}" if rows else "",
    ]
    return "  ".join(text for text in (model, *notes) if text)


def _style(status: str) -> str:
    return {"": "", _SKIPPED: "faint", "CANCELLED": "late"}.get(status, "bad")


def _number(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _printable(text: object) -> str:
    """One line without characters that move the cursor."""
    return "".join(character if character.isprintable() else " " for character in str(text))
