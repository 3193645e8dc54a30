"""A random forest of scikit-learn behind the interface of the Python backend.

The forest is fitted when the model is loaded, from the training images beside this file: with a fixed seed that takes a
tenth of a second and gives the same forest each time. A pickled forest would be code that runs when it is read, and
would fit one version of scikit-learn only.
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from sklearn.ensemble import RandomForestClassifier


def fit_forest(training_data):
    """The forest, fitted on ``images`` (uint8 ``[n, 8, 8]``) and ``labels`` of an npz file."""
    with np.load(training_data, allow_pickle=False) as training:
        pixels = training["images"].astype(np.float32) * np.float32(16 / 255)
        labels = training["labels"]
    forest = RandomForestClassifier(n_estimators=50, random_state=0, n_jobs=1)
    return forest.fit(pixels.reshape(len(pixels), -1), labels)


def predict_probabilities(forest, pixels):
    """Probability of each digit, FP32 ``[n, 10]``, for pixels ``[n, 1, 8, 8]``."""
    return forest.predict_proba(pixels.reshape(len(pixels), -1)).astype(np.float32)


class TritonPythonModel:
    """PIXELS to LABEL and PROBS; the requests of a batch are answered by one prediction."""

    def initialize(self, args):
        """Fit the forest."""
        self.forest = fit_forest(Path(args["model_repository"]) / args["model_version"] / "training.npz")

    def execute(self, requests):
        """One response for each request, in order."""
        pixels = [pb_utils.get_input_tensor_by_name(request, "PIXELS").as_numpy() for request in requests]
        probabilities = predict_probabilities(self.forest, np.concatenate(pixels))
        ends = np.cumsum([len(rows) for rows in pixels])[:-1]
        return [self._response(rows) for rows in np.split(probabilities, ends)]

    def _response(self, probabilities):
        label = self.forest.classes_[probabilities.argmax(axis=1)][:, None]
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor("LABEL", label), pb_utils.Tensor("PROBS", probabilities)]
        )
