"""The sum of a sequence so far, and with the number of the sequence, which comes as text, where it ends."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT is the sum of INPUT since START, + END * CORRID."""

    def initialize(self, args):
        """No sequence has started."""
        self.sums = {}

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            value, start, end, name = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
                for name in ("INPUT", "START", "END", "CORRID")
            )
            total = value if start else self.sums[name] + value
            self.sums[name] = total
            if end:
                total = self.sums.pop(name) + int(name)
            output = pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
