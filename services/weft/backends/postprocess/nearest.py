"""``nearest``: nearest-neighbour lookup of an embedding in a table."""

import json

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import existing_file
from weft.base.tensors import Array
from weft.serving.backends.base import RowBackend, check_finite
from weft.serving.backends.loading import check_tensor, model_file, only_input, require
from weft.serving.backends.parameters import ParameterReader

_MIN_NORM = np.float32(1e-12)


class NearestBackend(RowBackend):
    """Finds the table entry of the highest cosine similarity, and that similarity.

    ::

        EMBEDDING FP32 [n, D]  ->  TEXT BYTES [n, 1], SCORE FP32 [n, 1]

        score[i] = q . t[i] / (max(|q|, 1e-12) * max(|t[i]|, 1e-12))         TEXT = entries[argmax_i score[i]]

    Tensors may have any names: the BYTES output is the entry, the FP32 output the score; one of them may be undeclared.
    Among equal scores the first entry wins; a zero query scores 0 with every entry.

    The version folder holds ``table.safetensors`` (or ``default_model_filename``) with the tensor ``embeddings``,
    float32 [N, D], and ``entries.json``, a list of N strings.

    Parameters:
        entries: File name of the strings. Default entries.json.

    An embedding that is not finite is INVALID_ARGUMENT for its own request alone.
    """

    def load(self) -> None:
        """Read the table, normalised once, and the entries."""
        parameters = ParameterReader(self.model)
        entries_file = parameters.text("entries", "entries.json")
        parameters.finish()
        self._table = self._read_table()
        self._entries = self._read_entries(entries_file)
        self._input = only_input(self.model, ("FP32",), (self._table.shape[0],)).name
        outputs = self.model.signature.outputs
        self._by_datatype = {check_tensor(self.model, o, ("BYTES", "FP32"), (1,)).datatype: o.name for o in outputs}
        if len(self._by_datatype) != len(outputs):
            raise self.model.fault(
                "output",
                f"model '{self.model.signature.name}' must have one BYTES output (the entry), one FP32 output (the "
                f"score), or both, got {', '.join(f'{o.name} {o.datatype}' for o in outputs)}",
            )

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compare each query with every entry."""
        query = inputs[self._input]
        check_finite(query, self._input)
        query = query / np.maximum(np.linalg.norm(query, axis=-1, keepdims=True), _MIN_NORM)
        scores = query @ self._table
        best = scores.argmax(axis=-1, keepdims=True)
        answers = {"BYTES": self._entries[best], "FP32": np.take_along_axis(scores, best, axis=-1)}
        return {name: answers[datatype] for datatype, name in self._by_datatype.items()}

    def _read_table(self) -> Array:
        """Normalised embeddings, transposed: float32 [D, N]."""
        path = model_file(self.model, "table.safetensors")
        safetensors = require("safetensors.numpy", "transforms")
        try:
            tensors = safetensors.load_file(path)
        except Exception as error:  # the package's own exception, or an OSError
            raise InvalidArgumentError(f"{path} is not a safetensors file: {error}") from error
        table = tensors.get("embeddings")
        if (
            table is None
            or table.ndim != 2
            or table.dtype != np.float32
            or not table.size
            or not np.isfinite(table).all()
        ):
            found = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in tensors.items())
            raise InvalidArgumentError(
                f"{path} must hold a tensor 'embeddings' of finite float32 [N, D], N and D at least 1; it holds {found}"
            )
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), _MIN_NORM)
        return np.ascontiguousarray(table.T)

    def _read_entries(self, filename: str) -> Array:
        """Entries as an object array of bytes, one per row of the table."""
        path = existing_file(self.model.directory, filename)
        try:
            entries = json.loads(path.read_bytes())
        except ValueError as error:
            raise InvalidArgumentError(f"{path} is not JSON: {error}") from error
        num_rows = self._table.shape[1]
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise InvalidArgumentError(f"{path} must be a list of strings")
        if len(entries) != num_rows:
            raise InvalidArgumentError(f"{path} has {len(entries)} entries, but the table has {num_rows} rows")
        return np.array([entry.encode() for entry in entries], np.object_)
