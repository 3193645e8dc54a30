"""Maps columns to tensors: data-set columns to inputs, outputs to columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import INTEGERS, NUMPY_BY_DATATYPE, Array, WireTensor, array_of, datatype_of, encode, fits, shown
from weft.base.text.suggestion import suggestion
from weft.jobs.readers import parsed_json

#: Types of Arrow by V2 datatype; BF16, which Arrow lacks, becomes float32.
_ARROW: dict[str, pa.DataType] = {
    "BOOL": pa.bool_(),
    "UINT8": pa.uint8(),
    "UINT16": pa.uint16(),
    "UINT32": pa.uint32(),
    "UINT64": pa.uint64(),
    "INT8": pa.int8(),
    "INT16": pa.int16(),
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "FP16": pa.float16(),
    "FP32": pa.float32(),
    "FP64": pa.float64(),
    "BF16": pa.float32(),
}
#: Column that says which row of the data set, counted from 0, a row of the output is.
ROW = "row"


@dataclass(frozen=True)
class InputValues:
    """Values of one input for some rows, and the errors of rows without one, by index.

    One array a row, of the input's shape without the batch dimension; None for a row without a valid value. An array
    ``[n, ...]`` if every row has one, all of the same shape.
    """

    values: Array | list[Array | None]
    faults: Mapping[int, str]

    def shape(self, row: int) -> tuple[int, ...]:
        """Shape of a row that has a value."""
        value = self.values[row]
        return () if value is None else tuple(value.shape)

    def tensor(self, rows: Sequence[int]) -> WireTensor:
        """The given rows, whose values have one shape, as a tensor with a leading batch dimension."""
        if isinstance(self.values, np.ndarray):
            first, count = rows[0], len(rows)
            is_run = rows[-1] - first == count - 1
            return encode(np.ascontiguousarray(self.values[first : first + count] if is_run else self.values[rows]))
        return encode(np.stack([value for row in rows if (value := self.values[row]) is not None]))


def read_column(spec: TensorSpec, column: Any, *, is_text: bool) -> InputValues:
    """Convert an Arrow column, or a list of Python values, to values of an input.

    A number, boolean or text is an input of one element; lists, nested as the input's shape, are any others. Integers
    are accepted for floating-point inputs; nothing else is converted. If every value is text (``is_text``), inputs of
    other types than BYTES are parsed as JSON.

    Raises:
        InvalidArgumentError: No value of the Arrow column's type can fit.
    """
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        _check_type(spec, column.type)
        dense = _dense(spec, column)
        if dense is not None:
            return InputValues(dense, {})
        column = column.to_pylist()
    values: list[Array | None] = []
    faults: dict[int, str] = {}
    for row, value in enumerate(column):
        try:
            values.append(_value(spec, value, is_text=is_text))
        except InvalidArgumentError as error:
            values.append(None)
            faults[row] = error.message
    if values and not faults and all(value is not None and value.shape == values[0].shape for value in values):  # type: ignore[union-attr]
        return InputValues(np.stack(values), faults)  # type: ignore[arg-type]
    return InputValues(values, faults)


def _joined(columns: Sequence[Any], *, is_text: bool) -> Any:
    """Join several scalar columns into a column of lists; one column stays unchanged."""
    if len(columns) == 1:
        return columns[0]
    if is_text:
        return [None if None in cells else f"[{','.join(cells)}]" for cells in zip(*columns, strict=True)]
    plain = [column if isinstance(column, list) else column.to_pylist() for column in columns]
    return [None if None in cells else list(cells) for cells in zip(*plain, strict=True)]


def _check_type(spec: TensorSpec, type: pa.DataType) -> None:  # Arrow's word
    element = type
    while pa.types.is_nested(element) and element.num_fields == 1:
        element = element.field(0).type
    if spec.datatype == "BYTES":
        tests = [pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary]
    elif spec.datatype == "BOOL":
        tests = [pa.types.is_boolean]
    else:
        tests = [pa.types.is_integer] if spec.datatype in INTEGERS else [pa.types.is_integer, pa.types.is_floating]
    if not any(test(element) for test in [*tests, pa.types.is_null, pa.types.is_dictionary]):
        raise InvalidArgumentError(
            f"a column of type {type} does not fit the input '{spec.name}', {spec.datatype}{list(spec.dims)}; "
            "--column INPUT=COLUMN names another, or convert it"
        )


def _dense(spec: TensorSpec, column: Any) -> Array | None:
    """All rows as one array, without inspecting each; None if shapes or types differ or do not fit."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunk
        return None
    shape = [len(array)]
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count or not len(array):
            return None
        flat = array.flatten()
        width, rest = divmod(len(flat), len(array))
        if rest:
            return None
        if not pa.types.is_fixed_size_list(array.type) and (np.diff(array.offsets.to_numpy()) != width).any():
            return None
        shape.append(width)
        array = flat
    if array.null_count or array.type != _ARROW.get(spec.datatype) or spec.datatype == "BF16":
        return None
    own = tuple(shape[1:]) or (1,) * len(spec.dims)
    if not fits(own, spec.dims):
        return None
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.astype(NUMPY_BY_DATATYPE[spec.datatype], copy=False).reshape(len(column), *own)


def _value(spec: TensorSpec, value: Any, *, is_text: bool) -> Array:
    if is_text and spec.datatype != "BYTES":
        try:
            value = parsed_json(value)
        except (ValueError, RecursionError, TypeError):
            raise InvalidArgumentError(f"'{spec.name}': {shown(value)} is no JSON") from None
    if value is None:
        raise InvalidArgumentError(f"'{spec.name}' has no value")
    array = array_of(value, spec.datatype, what=f"'{spec.name}'")
    if array.ndim == 0:
        array = array.reshape((1,) * len(spec.dims))
    if not fits(array.shape, spec.dims):
        raise InvalidArgumentError(
            f"'{spec.name}' has shape {list(array.shape)}, which does not fit {list(spec.dims)}: {shown(value)}"
        )
    return array


def _output_type(spec: TensorSpec, *, is_binary: bool) -> pa.DataType:
    """Arrow type of an output's column: a plain value for one element, else nested lists of its shape."""
    element = (pa.binary() if is_binary else pa.string()) if spec.datatype == "BYTES" else _ARROW[spec.datatype]
    for _ in _list_dims(spec):
        element = pa.list_(element)
    return element


def write_column(spec: TensorSpec, values: Array | Sequence[Array | None], *, is_binary: bool) -> pa.Array:
    """Make an output's column from one array a row (None: it lacks one), or from one array ``[n, ...]`` of all.

    Raises:
        InvalidArgumentError: Text is not UTF-8.
    """
    rank = len(_list_dims(spec))
    wanted = _output_type(spec, is_binary=is_binary)
    if spec.datatype == "BYTES":
        rows = [None if value is None else _texts(spec, np.asarray(value), rank, is_binary) for value in values]
        return pa.array(rows, wanted)
    if isinstance(values, np.ndarray):
        flat = values.reshape(-1)
        shapes = np.broadcast_to(np.array(values.shape[1:], np.int64), (len(values), values.ndim - 1))
    elif any(value is None for value in values) or not values:
        return pa.array([None if value is None else _plain(value, rank) for value in values], wanted)
    else:
        flat = np.concatenate([value.reshape(-1) for value in values if value is not None])
        shapes = np.array([value.shape for value in values if value is not None], np.int64).reshape(len(values), -1)
    if spec.datatype == "BF16":
        flat = flat.astype(np.float32)
    column = pa.array(flat)
    for depth in range(rank, 0, -1):
        # How many lists of this depth each row has, and how long each of them is.
        counts = shapes[:, : depth - 1].prod(axis=1)
        lengths = np.repeat(shapes[:, depth - 1], counts)
        column = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), column)
    return column.cast(wanted)


def _list_dims(spec: TensorSpec) -> tuple[int, ...]:
    """Dimensions that become lists: none for one element per row."""
    return () if all(dim == 1 for dim in spec.dims) else spec.dims


def _plain(value: Array, rank: int) -> Any:
    array = value.astype(np.float32) if datatype_of(value) == "BF16" else value
    return array.tolist() if rank else array.reshape(-1)[0].item()


def _texts(spec: TensorSpec, value: Array, rank: int, is_binary: bool) -> Any:
    nested = value.tolist() if rank else value.reshape(-1)[0]

    def decoded(one: Any) -> Any:
        return [decoded(each) for each in one] if isinstance(one, list) else one.decode()

    try:
        return nested if is_binary else decoded(nested)
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"output '{spec.name}' is not UTF-8 text; name it in --binary, which keeps bytes"
        ) from None


@dataclass(frozen=True)
class Layout:
    """Mapping between columns and tensors.

    Attributes:
        column_of: Column of each input, by its name; several scalar columns are separated by commas.
        binary: Outputs of BYTES that stay bytes; the others are UTF-8 text.
        keep: Columns of the data set that are copied to the output, with their types.
        rows_per_request: Rows of one request; 1 without a batch dimension.
        kept_types: Types of ``keep``, by name; others become text, and values that are not text JSON.
    """

    inputs: tuple[TensorSpec, ...]
    column_of: Mapping[str, str]
    outputs: tuple[TensorSpec, ...]
    binary: frozenset[str]
    keep: tuple[str, ...]
    has_batch: bool
    rows_per_request: int
    kept_types: Mapping[str, pa.DataType] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns to read, each once."""
        filling = [name for spec in self.inputs for name in self.column_of[spec.name].split(",")]
        return list(dict.fromkeys([*filling, *self.keep]))

    def read(self, spec: TensorSpec, columns: Mapping[str, Any], *, is_text: bool) -> InputValues:
        """Values of an input from the columns of some rows. Raises as ``read_column``."""
        own = [columns[name] for name in self.column_of[spec.name].split(",")]
        return read_column(spec, _joined(own, is_text=is_text), is_text=is_text)

    def tensors(self, inputs: Mapping[str, InputValues], rows: Sequence[int]) -> dict[str, WireTensor]:
        """Tensors of one request for these rows; without a batch dimension that is one row."""
        tensors = {name: values.tensor(rows) for name, values in inputs.items()}
        if self.has_batch:
            return tensors
        return {name: tensor._replace(shape=tensor.shape[1:]) for name, tensor in tensors.items()}

    @property
    def schema(self) -> pa.Schema:
        """Columns of the output."""
        kept = [(name, self.kept_types.get(name, pa.string())) for name in self.keep]
        answers = [(spec.name, _output_type(spec, is_binary=spec.name in self.binary)) for spec in self.outputs]
        return pa.schema([(ROW, pa.int64()), *kept, *answers])


def make_layout(
    signature: ModelSignature,
    *,
    column_of: Mapping[str, str],
    outputs: Sequence[str] = (),
    binary: Sequence[str] = (),
    keep: Sequence[str] = (),
    rows_per_request: int = 0,
) -> Layout:
    """Map columns to tensors; the arguments are those of ``BatchOptions``; 0 rows a request: the largest batch.

    Raises:
        InvalidArgumentError: A name is unknown, or a number does not fit the graph.
    """
    inputs_by_name = {spec.name: spec for spec in signature.inputs}
    outputs_by_name = {spec.name: spec for spec in signature.outputs}
    for option, names, known in (
        ("--column", column_of, inputs_by_name),
        ("--write", outputs, outputs_by_name),
        ("--binary", binary, outputs_by_name),
    ):
        for name in names:
            if name not in known:
                raise InvalidArgumentError(f"{option} '{name}': {signature.name} has none{suggestion(name, known)}")
    most = signature.max_batch_size or 1
    if not 0 <= rows_per_request <= most:
        raise InvalidArgumentError(
            f"--rows-per-request must be from 1 to {most}, the largest batch of '{signature.name}', got "
            f"{rows_per_request}"
        )
    filled = tuple(spec for spec in signature.inputs if not spec.is_optional or spec.name in column_of)
    if not filled:
        raise InvalidArgumentError(
            f"every input of '{signature.name}' is optional; --column says which to fill: "
            f"{', '.join(inputs_by_name) or 'none'}"
        )
    written = tuple(outputs_by_name[name] for name in outputs) or signature.outputs
    taken = {spec.name for spec in written} | {ROW}
    for name in keep:
        if name in taken:
            raise InvalidArgumentError(f"--keep '{name}': the output has a column of that name already")
    return Layout(
        inputs=filled,
        column_of={spec.name: column_of.get(spec.name, spec.name) for spec in filled},
        outputs=written,
        binary=frozenset(binary),
        keep=tuple(dict.fromkeys(keep)),
        has_batch=signature.max_batch_size > 0,
        rows_per_request=rows_per_request or most,
    )
