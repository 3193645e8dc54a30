"""Which columns and tensors belong together: ``Layout``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor
from weft.base.text.suggestion import suggestion
from weft.jobs.columns import InputValues, joined, output_type, read_column

#: Column that says which row of the data set, counted from 0, a row of the output is.
ROW = "row"


@dataclass(frozen=True)
class Layout:
    """How columns and tensors belong together.

    Attributes:
        inputs: The inputs that columns fill.
        column_of: Column of each input, by its name; several with commas between them, each a scalar.
        outputs: The outputs that are written.
        binary: Those of BYTES that stay bytes; the others are UTF-8 text.
        keep: Columns of the data set that are written beside them, with their types.
        has_batch: A request has a batch dimension.
        rows_per_request: Rows of one request; 1 without a batch dimension.
        kept_types: Types of ``keep``, by name; others than these are text, and values that are none JSON.
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
        """The columns that are read, each once."""
        filling = [name for spec in self.inputs for name in self.column_of[spec.name].split(",")]
        return list(dict.fromkeys([*filling, *self.keep]))

    def read(self, spec: TensorSpec, columns: Mapping[str, Any], *, is_text: bool) -> InputValues:
        """Values of an input from the columns of some rows. Raises as ``read_column``."""
        own = [columns[name] for name in self.column_of[spec.name].split(",")]
        return read_column(spec, joined(own, is_text=is_text), is_text=is_text)

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
        answers = [(spec.name, output_type(spec, is_binary=spec.name in self.binary)) for spec in self.outputs]
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
    """Which column goes where.

    Args:
        signature: Of the graph or model.
        column_of: Column of an input, where it has another name; an optional input is filled only if it is here.
        outputs: Those to write; none: all.
        binary: Outputs of BYTES that are no text.
        keep: Columns of the data to write beside the answers.
        rows_per_request: 0: the largest batch, 1 if there is none.

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
