"""The sum and the difference of two inputs that are written as text."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is INPUT0 + INPUT1, OUTPUT1 is INPUT0 - INPUT1."""

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            first, second = (
                pb_utils.get_input_tensor_by_name(request, f"INPUT{i}").as_numpy().astype(np.int64) for i in range(2)
            )
            results = {"OUTPUT0": first + second, "OUTPUT1": first - second}
            outputs = [pb_utils.Tensor(name, value.astype(str).astype(np.object_)) for name, value in results.items()]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
