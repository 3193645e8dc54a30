"""Answers as a person reads them."""

import json
import re

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
