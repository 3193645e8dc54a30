"""Adds up its input, which may be large."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = the sum of each row of INPUT0."""

    def execute(self, requests):
        """One response for each request."""
        sums = [
            pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().sum(axis=1, keepdims=True)
            for request in requests
        ]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", one)]) for one in sums]
