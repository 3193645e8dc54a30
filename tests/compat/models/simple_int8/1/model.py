"""The sum and the difference of two inputs."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is INPUT0 + INPUT1, OUTPUT1 is INPUT0 - INPUT1."""

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            first, second = (pb_utils.get_input_tensor_by_name(request, f"INPUT{i}").as_numpy() for i in range(2))
            outputs = [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
