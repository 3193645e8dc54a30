"""The elements of an input, each as a response of its own."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUT and IDX are an element of IN and its index, sent DELAY milliseconds after the one before."""

    def execute(self, requests):
        """Returns WAIT milliseconds after the start of the last request; a thread sends the responses."""
        for request in requests:
            threading.Thread(target=_send, args=(request, request.get_response_sender()), daemon=True).start()
            time.sleep(int(pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0]) / 1000)


def _send(request, sender):
    values, delays = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY"))
    for index, (value, delay_ms) in enumerate(zip(values, delays, strict=True)):
        time.sleep(int(delay_ms) / 1000)
        outputs = [
            pb_utils.Tensor("OUT", np.array([value], np.int32)),
            pb_utils.Tensor("IDX", np.array([index], np.uint32)),
        ]
        sender.send(pb_utils.InferenceResponse(outputs))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
