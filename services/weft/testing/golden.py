"""Golden answers: outputs as JSON, a line each, and their comparison with others."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.base.tensors import FLOATS, NUMPY_BY_DATATYPE, datatype_of


def golden_text(outputs: Mapping[str, Any]) -> str:
    """Datatype, shape and elements of each output; floating point in the shortest form that is exact."""
    lines = []
    for name, value in outputs.items():
        array = np.asarray(value)
        kept = {"datatype": datatype_of(array), "shape": array.shape, "data": [*map(plain, array.reshape(-1))]}
        lines.append(f"  {json.dumps(name)}: {json.dumps(kept, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compare(outputs: Mapping[str, Any], text: str, where: str, *, rtol: float, atol: float) -> None:
    """Raise AssertionError unless the outputs are those of ``text``; ``where`` names it."""
    try:
        golden = json.loads(text)
    except ValueError as error:
        raise AssertionError(f"{where} is no JSON: {error}") from None
    if outputs.keys() != golden.keys():
        raise AssertionError(f"the outputs are {', '.join(outputs)}; {where} has {', '.join(golden)}")
    for name, kept in golden.items():
        array, title = np.asarray(outputs[name]), f"output '{name}' and {where}"
        found = f"{datatype_of(array)} {list(array.shape)}"
        if found != f"{kept['datatype']} {kept['shape']}":
            raise AssertionError(f"output '{name}' is {found}; {where} has {kept['datatype']} {kept['shape']}")
        if kept["datatype"] in FLOATS:
            expected = np.array(kept["data"], NUMPY_BY_DATATYPE[kept["datatype"]]).reshape(kept["shape"])
            wide = array.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, equal_nan=True, err_msg=title)
        else:
            elements = np.array([*map(plain, array.reshape(-1))], np.object_).reshape(array.shape)
            expected = np.array([*kept["data"], None], np.object_)[:-1].reshape(kept["shape"])
            np.testing.assert_array_equal(elements, expected, err_msg=title)


def plain(element: Any) -> Any:
    """An element as in JSON."""
    if isinstance(element, bytes):
        try:
            return element.decode()
        except UnicodeDecodeError:
            return {"b64": base64.b64encode(element).decode()}
    is_exact = isinstance(element, str) or element.dtype.kind in "biu"
    return getattr(element, "item", lambda: element)() if is_exact else float(str(element))
