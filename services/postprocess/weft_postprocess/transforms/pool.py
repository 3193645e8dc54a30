"""``pool``: one embedding per text from the hidden states of its tokens."""

from typing import ClassVar

import numpy as np

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import Array
from weft_serving.backends.base import TensorBackend
from weft_serving.backends.loading import check_tensor
from weft_serving.backends.parameters import ParameterReader
from weft_serving.request import InferenceRequest

_MIN_TOKENS = np.float32(1e-9)
_MIN_NORM = np.float32(1e-12)


class PoolBackend(TensorBackend):
    """Answers with the mean of the hidden states over the tokens that the mask keeps, scaled to length 1.

    ::

        last_hidden_state FP32 [n, L, H], attention_mask INT64 [n, L]  ->  EMBEDDING FP32 [n, H]

        m = sum_l mask[l] * h[l] / max(sum_l mask[l], 1e-9)         e = m / max(|m|, 1e-12)

    Tensors may have any names: the input of two dimensions is the hidden state, the other one (INT64, INT32 or BOOL)
    the mask. A row whose mask is all 0 gives a zero vector.

    Parameters:
        normalize: Whether to divide by the Euclidean norm. Default true.

    Different L of the two inputs is INVALID_ARGUMENT.

    Source:
        Mean pooling and normalisation of https://www.sbert.net (modules ``Pooling`` and ``Normalize``).
    """

    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Find out which input is which, and read the parameters."""
        signature = self.model.signature
        if len(signature.inputs) != 2 or len(signature.outputs) != 1:
            raise InvalidArgumentError(
                f"model '{signature.name}' must have two inputs (hidden states and mask) and one output, got "
                f"{len(signature.inputs)} and {len(signature.outputs)}"
            )
        hidden, mask = sorted(signature.inputs, key=lambda spec: -len(spec.dims))
        self._hidden = check_tensor(self.model, hidden, ("FP32",), (None, None)).name
        self._mask = check_tensor(self.model, mask, ("INT64", "INT32", "BOOL"), (None,)).name
        self._output = check_tensor(self.model, signature.outputs[0], ("FP32",), (hidden.dims[1],)).name
        if signature.max_batch_size == 0:
            raise InvalidArgumentError(
                f"model '{signature.name}': backend 'pool' needs max_batch_size of at least 1, got 0"
            )
        parameters = ParameterReader(self.model)
        self._normalizes = parameters.flag("normalize", True)
        parameters.finish()

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Hidden states and mask, of one length."""
        hidden, mask = request.array(self._hidden), request.array(self._mask)
        if hidden.shape[:2] != mask.shape:
            raise InvalidArgumentError(
                f"'{self._hidden}' has shape {list(hidden.shape)} and '{self._mask}' {list(mask.shape)}; the first two "
                "dimensions must be equal"
            )
        return {self._hidden: hidden, self._mask: mask}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Pool and scale."""
        mask = inputs[self._mask].astype(np.float32)
        mean = (mask[:, None, :] @ inputs[self._hidden])[:, 0, :]
        mean /= np.maximum(mask.sum(axis=1, keepdims=True), _MIN_TOKENS)
        if self._normalizes:
            mean /= np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), _MIN_NORM)
        return {self._output: mean}
