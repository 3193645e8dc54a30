"""``sigmoid``: multi-label classification, from scores to probabilities and labels."""

import numpy as np

from weft.backends.postprocess.classifier import ClassifierBackend
from weft.base.tensors import Array
from weft.serving.backends.rows import check_rows


class SigmoidBackend(ClassifierBackend):
    """Computes the independent probability of each class, and ranks those that reach the threshold.

    ::

        SCORES FP32 [n, C]  ->  PROBS     FP32  [n, C]    p[c] = 1 / (1 + exp(-s[c] / T))
                                TOP_PROBS FP32  [n, k]    the k largest p of at least the threshold, then 0
                                INDEX     INT64 [n, k]    their classes, then -1
                                LABEL     BYTES [n, k]    their labels, then empty
                                COUNT     INT64 [n, 1]    how many of the k there are

    The input may have any name, and also be FP16 or BF16; only declared outputs are computed. Among equal
    probabilities the lower class comes first.

    Parameters (all optional):
        temperature: T, above 0; larger is flatter. Dimensionless. Default 1.
        top_k: k, 1 to C. Default C; 1 where C is declared as -1.
        threshold: Classes of smaller probability are not listed; one number from 0 to 1, or one per class,
            comma-separated. Default 0.5.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    A score that is NaN is INVALID_ARGUMENT for its own request alone; -inf is probability 0, inf is 1.
    """

    default_threshold = 0.5
    lists_all = True
    has_entropy = False

    def probabilities(self, scores: Array) -> Array:
        """Sigmoid of each score, without overflow."""
        check_rows(
            ~np.isnan(scores), self.input, lambda row: f"nan at [{np.isnan(scores[row]).argmax()}]; send numbers"
        )
        with np.errstate(over="ignore"):  # an overflow to infinity gives the right limit
            scaled = scores / self.temperature
        small = np.exp(-np.abs(scaled))
        probabilities: Array = np.where(scaled >= 0, np.float32(1), small) / (1 + small)
        return probabilities
