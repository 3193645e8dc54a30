"""``softmax``: single-label classification, from scores to probabilities and the best labels."""

import numpy as np

from weft.backends.postprocess.classifier import ClassifierBackend
from weft.base.tensors import Array
from weft.serving.backends.rows import check_rows


class SoftmaxBackend(ClassifierBackend):
    """Computes the softmax of the scores, and the ``k`` most likely classes, best first.

    ::

        SCORES FP32 [n, C]  ->  PROBS     FP32  [n, C]    p[c] = exp((s[c] - max s) / T) / sum_c exp((s[c] - max s) / T)
                                TOP_PROBS FP32  [n, k]    the k largest p; of equal ones the lower index first
                                INDEX     INT64 [n, k]    their classes
                                LABEL     BYTES [n, k]    their labels
                                COUNT     INT64 [n, 1]    how many of the k reach the threshold
                                ENTROPY   FP32  [n, 1]    -sum_c p[c] ln p[c], in nats; 0: certain, ln C: uniform

    The input may have any name, and also be FP16 or BF16; only declared outputs are computed. Elements
    behind COUNT hold probability 0, class -1 and an empty label. With k = 1, LABEL and TOP_PROBS are a label and its
    confidence.

    Parameters (all optional):
        temperature: T, above 0; larger is flatter. Dimensionless. Default 1.
        top_k: k, 1 to C. Default 1.
        threshold: Classes of smaller probability are not listed; one number from 0 to 1, or one per class,
            comma-separated. Default 0.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    Scores of a row whose largest is not finite are INVALID_ARGUMENT for their own request alone; -inf beside a finite
    score is probability 0.

    Source:
        Temperature: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599.
    """

    default_threshold = 0.0
    lists_all = False
    has_entropy = True

    def probabilities(self, scores: Array) -> Array:
        """Softmax of each row."""
        largest = scores.max(axis=1, keepdims=True)
        check_rows(
            np.isfinite(largest), self.input, lambda row: f"the largest score is {largest[row, 0]}; it must be finite"
        )
        with np.errstate(over="ignore"):  # an overflow to -inf gives probability 0
            probabilities: Array = np.exp((scores - largest) / self.temperature)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities
