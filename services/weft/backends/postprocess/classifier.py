"""Base of ``softmax`` and ``sigmoid``: from scores to ranked classes."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from weft.backends.postprocess.ranking import label_filename, read_labels, top_k
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.loading import only_input, outputs_among
from weft.serving.backends.parameters import ParameterReader
from weft.serving.backends.rows import RowBackend
from weft.serving.request.request import InferenceRequest

SCORES = ("FP32", "FP16", "BF16")


class ClassifierBackend(RowBackend):
    """Ranks the most likely classes of each row whose probability reaches a threshold."""

    #: Default of the parameter ``threshold``.
    default_threshold: ClassVar[float]

    #: Whether all classes are listed by default; otherwise only one.
    lists_all: ClassVar[bool]

    #: Whether the probabilities of a row form a distribution, and so have an entropy.
    has_entropy: ClassVar[bool]

    @abstractmethod
    def probabilities(self, scores: Array) -> Array:
        """Probabilities of ``scores``, both float32 ``[num_rows, num_classes]``; raises on invalid scores."""

    def load(self) -> None:
        """Read the parameters and the labels."""
        scores = only_input(self.model, SCORES, (None,))
        self.input, num_classes = scores.name, scores.dims[0]
        parameters = ParameterReader(self.model)
        is_fixed = num_classes > 0
        default_top_k = num_classes if self.lists_all and is_fixed else 1
        self._top_k = parameters.integer(
            "top_k", default_top_k, minimum=1, maximum=num_classes if is_fixed else 2**31 - 1
        )
        self.temperature = np.float32(parameters.number("temperature", 1.0))
        threshold = parameters.numbers("threshold", (self.default_threshold,), size=num_classes if is_fixed else 1)
        filename = parameters.text("labels", label_filename(self.model))
        parameters.finish()
        if self.temperature <= 0:
            raise parameters.fault("temperature", self.temperature, "above 0")
        if min(threshold) < 0 or max(threshold) > 1:
            raise parameters.fault("threshold", ",".join(map(str, threshold)), "from 0 to 1")
        self._threshold = np.array(threshold, np.float32)
        self._outputs = outputs_among(
            self.model,
            {
                "PROBS": (("FP32",), (num_classes,)),
                "TOP_PROBS": (("FP32",), (self._top_k,)),
                "INDEX": (("INT64",), (self._top_k,)),
                "LABEL": (("BYTES",), (self._top_k,)),
                "COUNT": (("INT64",), (1,)),
            }
            | ({"ENTROPY": (("FP32",), (1,))} if self.has_entropy else {}),
        )
        if "LABEL" in self._outputs:
            self._labels = read_labels(self.model, filename, num_classes, self.input)

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The scores, of at least ``top_k`` classes."""
        scores = self.rows(request, self.input)
        if scores.shape[1] < self._top_k:
            raise InvalidArgumentError(
                f"input '{self.input}' has {scores.shape[1]} scores per row; top_k asks for {self._top_k}"
            )
        return {self.input: scores}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compute probabilities, then the best classes."""
        probabilities = self.probabilities(inputs[self.input].astype(np.float32, copy=False))
        if self._outputs.keys() == {"PROBS"}:
            return {"PROBS": probabilities}
        is_listed = probabilities >= self._threshold
        best = top_k(np.where(is_listed, probabilities, np.float32(0)), self._top_k)
        is_best_listed = np.take_along_axis(is_listed, best, axis=1)
        index = np.where(is_best_listed, best, -1)
        outputs: dict[str, Array] = {}
        for name in self._outputs:
            if name == "PROBS":
                outputs[name] = probabilities
            elif name == "TOP_PROBS":
                outputs[name] = np.where(is_best_listed, np.take_along_axis(probabilities, best, axis=1), np.float32(0))
            elif name == "INDEX":
                outputs[name] = index
            elif name == "LABEL":
                outputs[name] = self._labels[index]
            elif name == "ENTROPY":
                logarithms = np.log(np.where(probabilities > 0, probabilities, np.float32(1)))
                outputs[name] = -(probabilities * logarithms).sum(axis=1, keepdims=True)
            else:
                outputs[name] = is_best_listed.sum(axis=1, keepdims=True, dtype=np.int64)
        return outputs
