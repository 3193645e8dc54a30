"""Golden answers: outputs as JSON, a line each, and their comparison with others."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.base.tensors import FLOATS, NUMPY_BY_DATATYPE, Array, datatype_of


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
        golden = {name: _expected(**one) for name, one in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise AssertionError(f"{where} has no golden answers: {error!r}") from None
    if outputs.keys() != golden.keys():
        raise AssertionError(f"the outputs are {', '.join(outputs)}; {where} has {', '.join(golden)}")
    for name, (datatype, shape, expected) in golden.items():
        array, title = np.asarray(outputs[name]), f"output '{name}' and {where}"
        found = f"{datatype_of(array)} {list(array.shape)}"
        if found != f"{datatype} {shape}":
            raise AssertionError(f"output '{name}' is {found}; {where} has {datatype} {shape}")
        if datatype in FLOATS:
            wide = array.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, equal_nan=True, err_msg=title)
        else:
            elements = np.array([*map(plain, array.reshape(-1))], np.object_).reshape(array.shape)
            np.testing.assert_array_equal(elements, expected, err_msg=title)


def _expected(datatype: str, shape: list[int], data: list[Any]) -> tuple[str, list[int], Array]:
    array = np.array(data, NUMPY_BY_DATATYPE[datatype]) if datatype in FLOATS else np.array([*data, None], object)[:-1]
    return datatype, shape, array.reshape(shape)


def plain(element: Any) -> Any:
    """An element as in JSON."""
    if isinstance(element, bytes):
        try:
            return element.decode()
        except UnicodeDecodeError:
            return {"b64": base64.b64encode(element).decode()}
    is_exact = isinstance(element, str) or element.dtype.kind in "biu"
    return getattr(element, "item", lambda: element)() if is_exact else float(str(element))
