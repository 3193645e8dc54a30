"""The input, one more where a sequence starts."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT is INPUT + START."""

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            value, start = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START"))
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value + start.reshape(value.shape))])
            )
        return responses
