"""The input, one more where a sequence starts, and with the number of the sequence where it ends."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT is INPUT + START + END * CORRID."""

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            value, start, end, number = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().astype(np.int32).ravel()
                for name in ("INPUT", "START", "END", "CORRID")
            )
            output = pb_utils.Tensor("OUTPUT", (value + start + end * number).reshape(-1, 1))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
