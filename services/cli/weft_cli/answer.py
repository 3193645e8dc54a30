"""Answers as a person reads them: values, and the trace as a tree."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft_common.core import InferResult
from weft_common.tensors import WireTensor, decode

_MAX_TEXT_CHARS = 200


def render_result(result: InferResult) -> str:
    """One line for each output: name, datatype, shape, values (long tensors are abridged)."""
    width = max((len(name) for name in result.outputs), default=0)
    return "\n".join(f"{name:<{width}}  {render_tensor(tensor)}" for name, tensor in result.outputs.items())


def render_tensor(tensor: WireTensor) -> str:
    """Datatype, shape and values; text is quoted, bytes that are no text are counted."""
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


@dataclass(slots=True)
class _Branch:
    label: str
    detail: str = ""
    children: "dict[str, _Branch]" = field(default_factory=dict)


def render_trace(steps: Sequence[Mapping[str, Any]]) -> str:
    """The steps of ``graph_trace`` as a tree of their paths, with milliseconds, model and status of each.

    Args:
        steps: Objects with ``path`` ("root/clf/bert") and, where known, ``target``, ``model``, ``version``, ``ms`` and
            ``status``.
    """
    top = _Branch("")
    for step in steps:
        branch = top
        for name in str(step["path"]).split("/"):
            branch = branch.children.setdefault(name, _Branch(name))
        branch.detail = _step_detail(step)
    lines: list[tuple[str, str]] = []
    for root in top.children.values():
        lines += [(root.label, root.detail), *_tree_lines(root.children, "")]
    width = max((len(left) for left, _ in lines), default=0)
    return "\n".join(f"{left:<{width}}  {detail}".rstrip() for left, detail in lines)


def _step_detail(step: Mapping[str, Any]) -> str:
    ms = f"{step['ms']:9.2f} ms" if isinstance(step.get("ms"), (int, float)) else " " * 12
    model = str(step.get("model") or "")
    if model and step.get("version"):
        model += f"@{step['version']}"
    if step.get("target"):
        model += f" on {step['target']}"
    status = str(step.get("status") or "")
    return f"{ms}  {model}" + ("" if status in ("", "OK") else f"  {status}")


def _tree_lines(children: Mapping[str, _Branch], indent: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for number, branch in enumerate(children.values(), start=1):
        is_last = number == len(children)
        lines.append((f"{indent}{'└─ ' if is_last else '├─ '}{branch.label}", branch.detail))
        lines += _tree_lines(branch.children, indent + ("   " if is_last else "│  "))
    return lines
