"""Stands in for an ensemble that decodes and classifies an image: how red, green and blue it is."""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    """OUTPUT is the mean of each channel of the encoded image in INPUT."""

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            encoded = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().ravel()[0]
            pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"), np.float32)
            output = pb_utils.Tensor("OUTPUT", pixels.mean(axis=(0, 1))[np.newaxis])
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
