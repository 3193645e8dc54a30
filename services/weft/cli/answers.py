"""Prints answers: tensors, streams, traces as trees."""

import base64
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.base.core import InferResult, Parameters, ParameterValue
from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor, decode, encode, split_bytes
from weft.base.text.suggestion import printable

_MAX_TEXT_CHARS = 200
# What language models call these tensors, after the vLLM backend of Triton Inference Server.
_TEXT_OUTPUT = "text_output"
_STREAM_INPUT = "stream"

BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_ROOT = re.compile(r"[^/\[]+")
_SKIPPED = "SKIPPED"

#: Text and the name of its style -> the text as it is printed.
Paint = Callable[[str, str], str]
_ANSI = {"bad": "31", "late": "33", "faint": "2", "bar": "36"}


def render_result(result: InferResult) -> str:
    """One line for each output: name, datatype, shape, values (long tensors are abridged); a note if there is none."""
    if not result.outputs:
        return "(the answer has no outputs: each may be left out)"
    width = max((len(name) for name in result.outputs), default=0)
    return printable("\n".join(f"{name:<{width}}  {render_tensor(tensor)}" for name, tensor in result.outputs.items()))


def result_as_json(result: InferResult) -> dict[str, Any]:
    """The response in V2's JSON; bytes that are not text become an object with their ``b64``."""
    outputs = [
        {"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": _values(tensor)}
        for name, tensor in result.outputs.items()
    ]
    head = {"model_name": result.model_name, "model_version": result.model_version, "id": result.request_id}
    return {**head, "parameters": dict(result.parameters), "outputs": outputs}


def _values(tensor: WireTensor) -> list[Any]:
    flat = decode(tensor).ravel()
    if tensor.datatype != "BYTES":
        values: list[Any] = flat.astype(np.float32).tolist() if tensor.datatype == "BF16" else flat.tolist()
        return values
    texts = []
    for element in flat:
        try:
            texts.append(element.decode())
        except UnicodeDecodeError:
            texts.append({"b64": base64.b64encode(element).decode()})
    return texts


def render_tensor(tensor: WireTensor) -> str:
    """Datatype, shape and values; text is quoted, other bytes are counted."""
    array = decode(tensor)
    if tensor.datatype == "BYTES":
        texts = np.array([_element(element) for element in array.ravel()], dtype=np.object_).reshape(array.shape)
        values = np.array2string(texts, threshold=20, edgeitems=3, formatter={"all": str}, separator=", ")
    else:
        wide = array.astype(np.float32) if tensor.datatype == "BF16" else array  # numpy prints no bfloat16
        values = np.array2string(wide, threshold=20, edgeitems=3, precision=4, suppress_small=True, separator=", ")
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.datatype}[{shape}]  " + re.sub(r"\n\s*", " ", values)


def _element(element: bytes) -> str:
    try:
        text = element.decode()
    except UnicodeDecodeError:
        return f"<{len(element)} bytes>"
    if len(text) > _MAX_TEXT_CHARS:
        text = text[: _MAX_TEXT_CHARS - 3] + "..."
    return json.dumps(text, ensure_ascii=False)


def ask_for_stream(specs: Sequence[TensorSpec], inputs: dict[str, WireTensor]) -> None:
    """Add the input ``stream`` of a language model, unless the command line gives it."""
    for spec in specs:
        if spec.name == _STREAM_INPUT and spec.datatype == "BOOL" and spec.name not in inputs:
            inputs[spec.name] = encode(np.ones([abs(dim) for dim in spec.dims], np.bool_))


async def print_stream(
    model: str, results: AsyncGenerator[InferResult, None], *, as_json: bool = False
) -> tuple[Parameters, float]:
    """Print responses as they come, then their number and timing.

    The text of an output ``text_output`` is printed without breaks, and the other outputs of the last response after
    it. Cancelling the task closes ``results``, which cancels the request. With ``as_json`` each response is printed as
    a line of JSON, and nothing else. Returns the parameters of the last response, and the time to it in milliseconds.

    Raises:
        WeftError: From ``results``; earlier responses are printed.
    """
    printer, parameters = _Printer(), dict[str, ParameterValue]()
    try:
        async with contextlib.aclosing(results):
            async for result in results:
                parameters = dict(result.parameters) or parameters
                if as_json:
                    print(json.dumps(result_as_json(result)), flush=True)
                else:
                    printer.show(result)
    finally:
        printer.end_line()
    return parameters, printer.elapsed_ms() if as_json else printer.summarize(model)


class _Printer:
    """Shows the responses of one request."""

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._first_ms = 0.0
        self._num_responses = 0
        self._rest: InferResult | None = None
        self._is_inside_line = False

    def show(self, result: InferResult) -> None:
        if result.is_null:
            return
        self._num_responses += 1
        self._first_ms = self._first_ms or self.elapsed_ms()
        if _TEXT_OUTPUT not in result.outputs:
            print(render_result(result), flush=True)
            return
        text = result.outputs.pop(_TEXT_OUTPUT)
        self._rest = result
        shown = "".join(printable(piece.decode(errors="replace")) for piece in split_bytes(text.data))
        sys.stdout.write(shown)
        sys.stdout.flush()
        if shown:
            self._is_inside_line = not shown.endswith("\n")

    def end_line(self) -> None:
        if self._is_inside_line:
            print()
            self._is_inside_line = False

    def summarize(self, model: str) -> float:
        """Print what followed the last text, the number of responses and their times; returns milliseconds."""
        duration_ms = self.elapsed_ms()
        if self._rest is not None and self._rest.outputs:
            print(render_result(self._rest))
        plural = "" if self._num_responses == 1 else "s"
        first = f", the first after {self._first_ms:.1f} ms" if self._num_responses else ""
        print(f"{model}: {self._num_responses} response{plural} in {duration_ms:.1f} ms{first}")
        return duration_ms

    def elapsed_ms(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1e6


def painter(*, is_coloured: bool) -> Paint:
    """Styles "bad", "late", "faint" and "bar" as ANSI colours, or nothing at all."""
    if not is_coloured:
        return lambda text, _: text
    return lambda text, style: f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if text and style else text


def read_trace(text: str) -> list[Mapping[str, Any]]:
    """The valid entries of ``graph_trace``; others are skipped, because any server may send them."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [e for e in entries if isinstance(e, dict) and e.get("path")] if isinstance(entries, list) else []


def span_ms(entries: Sequence[Mapping[str, Any]]) -> float:
    """Time from the start of the graph to the end of the last step, milliseconds."""
    return max((_number(e, "start_ms") + _number(e, "ms") for e in entries), default=0.0)


@dataclass(slots=True)
class _Branch:
    label: str
    path: str
    entry: Mapping[str, Any]
    children: list["_Branch"] = field(default_factory=list)


def render_trace(entries: Sequence[Mapping[str, Any]], paint: Paint | None = None) -> str:
    """Entries as a tree: milliseconds, a bar on the graph's time axis, model, and anything unusual.

    Args:
        entries: Objects with ``path`` ("root/clf/by_language[de]") and, if known, ``start_ms``, ``ms``, ``model``,
            ``version``, ``target``, ``status``, ``attempts``, ``cached``, ``rows``, ``fallback_of`` and ``error``. The
            steps of a node follow the step that ran it; a repeated path is another round of a loop.
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
    """The step's time as a bar on a line that represents the whole graph's time."""
    if not entry or entry.get("status") == _SKIPPED or total_ms <= 0:
        return " " * (BAR_WIDTH + 2)
    start = min(_number(entry, "start_ms") / total_ms, 1.0) * BAR_WIDTH
    offset = min(int(start), BAR_WIDTH - 1)
    eighths = max(1, round(_number(entry, "ms") / total_ms * BAR_WIDTH * 8))
    full, part = divmod(min(eighths, (BAR_WIDTH - offset) * 8), 8)
    drawn = "█" * full + (_EIGHTHS[part] if part else "")
    return " " * offset + paint(drawn, "bar") + " " * (BAR_WIDTH - offset - len(drawn) + 2)


def _what(entry: Mapping[str, Any], paint: Paint) -> str:
    """Model and target, then anything unusual."""
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
