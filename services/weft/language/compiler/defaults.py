"""Values that files give: defaults of outputs, for steps that were skipped or failed softly, and constants."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.base.tensors import FLOATS, INTEGERS, NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, num_elements
from weft.language.syntax.file import GraphFile, GraphReport
from weft.language.types.signatures import TensorType, dims_fit, shape_text
from weft_protos import graph_pb2 as pb

#: List of a default: datatypes that it is for, the first of them where the output's is not known.
_LISTS: dict[str, tuple[str, frozenset[str]]] = {
    "number": ("FP32", FLOATS),
    "integer": ("INT64", INTEGERS),
    "boolean": ("BOOL", frozenset({"BOOL"})),
    "text": ("BYTES", frozenset({"BYTES"})),
}

#: Greatest finite number of bfloat16, of which numpy alone knows nothing.
_MOST_BF16 = float.fromhex("0x1.fep127")


def given_tensor(
    file: GraphFile, path: str, message: pb.Default | pb.Constant, known: TensorType, report: GraphReport
) -> WireTensor | None:
    """The value as a tensor, of shape ``known.dims``, after a leading 1 if ``known`` has a batch dimension.

    Args:
        known: Type of the output or input. If unknown: FP32, INT64, BOOL or BYTES, by the list that is given.
        report: Receives errors: G025 no list or several, G007 a list or a value that does not fit the datatype, G008
            dims that do not fit, or another number of values.

    Returns:
        None if something was reported.
    """
    given = [name for name in _LISTS if getattr(message, name)]
    is_empty = not given and 0 in message.dims
    if len(given) > 1 or not (given or is_empty):
        text = f"{_words(message)} has {' and '.join(map(repr, given)) or 'no value'}; {_cure(known)}"
        report.error("G025", file, path, text)
        return None
    values: Sequence[Any] = getattr(message, given[0]) if given else ()
    datatype = known.datatype or (_LISTS[given[0]][0] if given else "FP32")
    if given and datatype not in _LISTS[given[0]][1]:
        text = f"'{_name(message)}' is {datatype}, from {known.origin}; {_cure(known)}"
        report.error("G007", file, f"{path}.{given[0]}[0]", text, is_name=True)
        return None
    dims = _dims(file, path, message, len(values), known, report)
    if dims is None or not _in_range(file, f"{path}.{given[0] if given else ''}", values, datatype, report):
        return None
    shape = (1, *dims) if known.is_batched else dims
    if datatype == "BYTES":
        return bytes_tensor(values, shape)
    with np.errstate(over="ignore"):
        return WireTensor(datatype, shape, np.asarray(values, dtype=NUMPY_BY_DATATYPE[datatype]).tobytes())


def _name(message: pb.Default | pb.Constant) -> str:
    return message.output if isinstance(message, pb.Default) else message.input


def _words(message: pb.Default | pb.Constant) -> str:
    return f"the {message.DESCRIPTOR.name.lower()} of '{_name(message)}'"


def _cure(known: TensorType) -> str:
    name = next((name for name, (_, datatypes) in _LISTS.items() if known.datatype in datatypes), "")
    return f"give its elements as '{name}: ...'" if name else f"give its elements as one of: {', '.join(_LISTS)}"


def _dims(
    file: GraphFile,
    path: str,
    message: pb.Default | pb.Constant,
    num_values: int,
    known: TensorType,
    report: GraphReport,
) -> tuple[int, ...] | None:
    """Shape without the batch dimension; the declared dims if none are given."""
    what, whose = _words(message), "output" if isinstance(message, pb.Default) else "input"
    wanted = f"the {whose} has {shape_text(known.dims)}, from {known.origin}"
    dims = tuple(message.dims)
    if not dims:
        if not known.is_known:
            dims = (num_values,)
        elif num_values == 1 and set(known.dims) <= {1, -1}:
            dims = (1,) * len(known.dims)
        elif -1 in known.dims:
            report.error("G008", file, path, f"{what} has no 'dims', and {wanted}; give the size for each -1")
            return None
        else:
            dims = known.dims
    for i, dim in enumerate(dims):
        if dim < 0:
            text = f"{what} has dimension {dim}; it has a fixed size, give 0 or more"
            report.error("G008", file, f"{path}.dims[{i}]", text)
            return None
    if known.is_known and not dims_fit(dims, known.dims):
        hint = ""
        if known.is_batched and dims_fit(dims, known.full_dims):
            hint = "; leave the batch dimension out, the value is that of every row"
        text = f"{what} has dims {shape_text(dims)}, but {wanted}{hint}"
        report.error("G008", file, f"{path}.dims", text, is_name=True)
        return None
    if num_elements(dims) != num_values:
        values = "1 value" if num_values == 1 else f"{num_values} values"
        text = f"{what} has {values}, but dims {shape_text(dims)} take {num_elements(dims)}"
        report.error("G008", file, path, text)
        return None
    return dims


def _in_range(file: GraphFile, path: str, values: Sequence[Any], datatype: str, report: GraphReport) -> bool:
    if datatype in INTEGERS:
        limits = np.iinfo(NUMPY_BY_DATATYPE[datatype])
        least, most = int(limits.min), int(limits.max)
        wrong = next((i for i, value in enumerate(values) if not least <= value <= most), None)
        allowed = f"{least} to {most}"
    elif datatype in FLOATS:
        dtype = NUMPY_BY_DATATYPE[datatype]
        most_finite = _MOST_BF16 if datatype == "BF16" else float(np.finfo(dtype).max)
        with np.errstate(over="ignore"):
            held = [math.isfinite(dtype.type(value)) or not math.isfinite(value) for value in values]
        wrong = held.index(False) if False in held else None
        allowed = f"{-most_finite:g} to {most_finite:g}"
    else:
        return True
    if wrong is not None:
        text = f"{values[wrong]:g} is out of range of {datatype}, which holds {allowed}"
        report.error("G007", file, f"{path}[{wrong}]", text)
    return wrong is None
