"""``pool``: one embedding per text from the hidden states of its tokens."""

import time

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.base import Batch, RowBackend, check_rows
from weft.serving.backends.loading import check_tensor
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest, Outcome

_MIN_NORM = np.float32(1e-12)
#: Key of the pooled vectors between ``prepare`` and ``run``; no input has this name.
_POOLED = ""
_POOLINGS = ("mean", "cls", "max", "last_token")


class PoolBackend(RowBackend):
    """Pools the hidden states of the unmasked tokens into one vector of length 1.

    ::

        last_hidden_state FP32 [n, L, H], attention_mask INT64 [n, L]  ->  EMBEDDING FP32 [n, H]

        mean        p = sum_l mask[l] * h[l] / sum_l mask[l]
        cls         p = h[first l with mask[l] = 1]
        max         p[i] = max over l with mask[l] = 1 of h[l, i]
        last_token  p = h[last l with mask[l] = 1]

        e = p / max(|p|, 1e-12)

    Tensors may have any names: the input of two dims is the hidden state (FP32, FP16 or BF16), the other one
    (INT64, INT32 or BOOL) the mask of 0 and 1, padded on either side. A row whose mask is all 0 gives a zero vector.
    Masked hidden states do not matter, unless they are not finite and the pooling is mean.

    Requests of different L share batches if the inputs have ``allow_ragged_batch``: each is pooled separately,
    without a copy of its hidden states, and only the vectors are concatenated.

    Parameters (all optional):
        pooling: ``mean``, ``cls``, ``max`` or ``last_token``. Default mean.
        normalize: Whether to divide by the Euclidean norm. Default true.

    Different L of the two inputs, a mask that is not 0 or 1, and hidden states whose result is not finite are
    INVALID_ARGUMENT for their own request alone.

    Source:
        Modules ``Pooling`` and ``Normalize`` of https://www.sbert.net.
    """

    def load(self) -> None:
        """Identify the inputs by their dims, and read the parameters."""
        signature = self.model.signature
        if len(signature.inputs) != 2 or len(signature.outputs) != 1:
            raise self.model.fault(
                "input",
                f"model '{signature.name}' must have two inputs (hidden states and mask) and one output, got "
                f"{len(signature.inputs)} and {len(signature.outputs)}",
            )
        hidden, mask = sorted(signature.inputs, key=lambda spec: -len(spec.dims))
        self._hidden = check_tensor(self.model, hidden, ("FP32", "FP16", "BF16"), (None, None)).name
        self._mask = check_tensor(self.model, mask, ("INT64", "INT32", "BOOL"), (None,)).name
        self._output = check_tensor(self.model, signature.outputs[0], ("FP32",), (hidden.dims[1],)).name
        parameters = ParameterReader(self.model)
        self._pooling = parameters.choice("pooling", "mean", _POOLINGS)
        self._normalizes = parameters.flag("normalize", True)
        parameters.finish()

    def execute(self, batch: Batch) -> list[Outcome]:
        """Like ``RowBackend.execute``, but the pooling of each request counts as inference time too."""
        start_ns = time.monotonic_ns()
        outcomes = super().execute(batch)
        batch.infer_start_ns = start_ns
        return outcomes

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The pooled vectors of one request, not normalised."""
        hidden, mask = self.rows(request, self._hidden), self.rows(request, self._mask)
        if hidden.shape[:2] != mask.shape:
            raise InvalidArgumentError(
                f"'{self._hidden}' has shape {list(hidden.shape)} and '{self._mask}' {list(mask.shape)}; the first two "
                "dimensions must be equal"
            )
        if mask.dtype != np.bool_:
            is_good = (mask == 0) | (mask == 1)
            if not is_good.all():
                check_rows(is_good, self._mask, lambda row: f"{mask[row][~is_good[row]][0]} in a mask of 0 and 1")
            mask = mask.astype(np.bool_)
        return {_POOLED: self._pooled(hidden, mask)}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Normalise."""
        pooled = inputs[_POOLED]
        with np.errstate(over="ignore", invalid="ignore"):
            norm = np.linalg.norm(pooled, axis=1, keepdims=True)
        check_rows(
            np.isfinite(norm),
            self._hidden,
            lambda row: f"the norm of the vector is {norm[row, 0]}; send finite numbers",
        )
        if self._normalizes:
            pooled /= np.maximum(norm, _MIN_NORM)
        return {self._output: pooled}

    def _pooled(self, hidden: Array, mask: Array) -> Array:
        """Pool ``hidden`` ``[n, L, H]`` with ``mask``, bool ``[n, L]``, into a new float32 array ``[n, H]``."""
        if not hidden.shape[1]:
            return np.zeros((len(hidden), hidden.shape[2]), np.float32)
        if self._pooling == "mean":
            hidden, weights = hidden.astype(np.float32, copy=False), mask.astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                mean: Array = (weights[:, None, :] @ hidden)[:, 0, :]
            mean /= np.maximum(weights.sum(axis=1, keepdims=True), 1)
            return mean
        pooled: Array
        if self._pooling == "max":
            hidden = hidden.astype(np.float32, copy=False)
            pooled = (hidden if mask.all() else np.where(mask[:, :, None], hidden, -np.inf)).max(axis=1)
        else:
            length = mask.shape[1]
            token = mask.argmax(axis=1) if self._pooling == "cls" else length - 1 - mask[:, ::-1].argmax(axis=1)
            pooled = hidden[np.arange(len(hidden)), token].astype(np.float32)
        pooled[~mask.any(axis=1)] = 0
        return pooled
