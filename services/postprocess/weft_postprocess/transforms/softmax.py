"""``softmax``: scores to probabilities and the best labels."""

from typing import ClassVar

import numpy as np

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import Array
from weft_serving.backends.base import TensorBackend
from weft_serving.backends.loading import existing_file, only_input, outputs_among
from weft_serving.backends.parameters import ParameterReader
from weft_serving.request import InferenceRequest


class SoftmaxBackend(TensorBackend):
    """Answers with the softmax of the scores, and with the ``k`` most likely classes, best first.

    ::

        SCORES FP32 [n, C]  ->  PROBS     FP32  [n, C]    p[c] = exp((s[c] - max s) / T) / sum_c exp((s[c] - max s) / T)
                                TOP_PROBS FP32  [n, k]    the k largest p; of equal ones the lower index first
                                INDEX     INT64 [n, k]    their classes
                                LABEL     BYTES [n, k]    their labels

    The input may have any name; of the outputs, those that are declared are computed.

    Parameters:
        temperature: T, above 0; larger is flatter. Dimensionless. Default 1.
        top_k: k, 1 to C. Default 1.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    Scores of a row whose largest is not finite are INVALID_ARGUMENT for their own request alone; -inf beside a finite
    score is probability 0.
    """

    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the parameters and the labels."""
        scores = only_input(self.model, ("FP32",), (None,))
        self._input, self._num_classes = scores.name, scores.dims[0]
        parameters = ParameterReader(self.model)
        maximum = self._num_classes if self._num_classes > 0 else 2**31 - 1
        self._top_k = parameters.integer("top_k", 1, minimum=1, maximum=maximum)
        self._temperature = np.float32(parameters.number("temperature", 1.0))
        filename = parameters.text("labels", self._declared_label_filename() or "labels.txt")
        parameters.finish()
        if self._temperature <= 0:
            raise InvalidArgumentError(
                f"model '{self.model.signature.name}': parameter 'temperature' must be above 0, got {self._temperature}"
            )
        self._outputs = outputs_among(
            self.model,
            {
                "PROBS": (("FP32",), (self._num_classes,)),
                "TOP_PROBS": (("FP32",), (self._top_k,)),
                "INDEX": (("INT64",), (self._top_k,)),
                "LABEL": (("BYTES",), (self._top_k,)),
            },
        )
        if "LABEL" in self._outputs:
            self._labels = self._read_labels(filename)

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The scores, each row with a finite maximum."""
        scores = request.array(self._input)
        if scores.shape[-1] < self._top_k:
            raise InvalidArgumentError(
                f"input '{self._input}' has {scores.shape[-1]} scores per row; top_k asks for {self._top_k}"
            )
        if not np.isfinite(scores.max(axis=-1)).all():
            raise InvalidArgumentError(f"input '{self._input}' has a row whose largest score is not finite")
        return {self._input: scores}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Softmax, then the best classes."""
        scores = inputs[self._input]
        with np.errstate(over="ignore"):  # what overflows becomes -inf, and its probability 0
            probabilities = np.exp((scores - scores.max(axis=-1, keepdims=True)) / self._temperature)
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        best = np.argsort(-probabilities, axis=-1, kind="stable")[..., : self._top_k]
        outputs: dict[str, Array] = {}
        for name in self._outputs:
            if name == "PROBS":
                outputs[name] = probabilities
            elif name == "TOP_PROBS":
                outputs[name] = np.take_along_axis(probabilities, best, axis=-1)
            elif name == "INDEX":
                outputs[name] = best.astype(np.int64, copy=False)
            else:
                outputs[name] = self._labels[best]
        return outputs

    def _declared_label_filename(self) -> str:
        for output in self.model.config.get("output", ()):
            if output["name"] == "LABEL":
                return str(output.get("label_filename", ""))
        return ""

    def _read_labels(self, filename: str) -> Array:
        """Labels as an object array of bytes, one per class."""
        path = existing_file(self.model.directory, filename, parents=(self.model.directory.parent,))
        labels = path.read_bytes().removesuffix(b"\n").replace(b"\r\n", b"\n").split(b"\n")
        if len(labels) != self._num_classes:
            raise InvalidArgumentError(
                f"{path} has {len(labels)} labels, but '{self._input}' has {self._num_classes} classes; give one line "
                "per class and declare their number"
            )
        return np.array(labels, np.object_)
