"""Answers as a person reads them."""

import base64
import json
import re
from typing import Any

import numpy as np

from weft.base.core import InferResult
from weft.base.tensors import WireTensor, decode
from weft.base.text.printable import printable

_MAX_TEXT_CHARS = 200


def render_result(result: InferResult) -> str:
    """One line for each output: name, datatype, shape, values (long tensors are abridged); one that says of none."""
    if not result.outputs:
        return "(the answer has no outputs: each may be left out)"
    width = max((len(name) for name in result.outputs), default=0)
    return printable("\n".join(f"{name:<{width}}  {render_tensor(tensor)}" for name, tensor in result.outputs.items()))


def result_as_json(result: InferResult) -> dict[str, Any]:
    """The response as the V2 protocol has it in JSON; bytes that are no text are an object with their ``b64``."""
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
    return [_text_or_b64(element) for element in flat]


def _text_or_b64(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(element).decode()}


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
