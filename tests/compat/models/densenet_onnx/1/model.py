"""Stands in for a classifier of images: how red, green and blue an image is."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """fc6_1 is the mean of each channel of data_0."""

    def execute(self, requests):
        """One response for each request."""
        images = [pb_utils.get_input_tensor_by_name(request, "data_0").as_numpy() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("fc6_1", image.mean(axis=(1, 2), dtype="float32"))])
            for image in images
        ]
