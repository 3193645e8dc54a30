import numpy as np
import triton_python_backend_utils as pb_utils

PHRASES = {
    "Return the": " number of items in the list.",
    "Reach us": " by letter. The clerk is ann@example.org today! Ask her for a form. The password is rosebud. Bye.",
}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            if text not in PHRASES:
                error = pb_utils.TritonError(f"no phrase begins with '{text}'", pb_utils.TritonError.UNAVAILABLE)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            for word in PHRASES[text].split(" ")[1:]:
                token = pb_utils.Tensor("text_output", np.array([f" {word}".encode()], np.object_))
                sender.send(pb_utils.InferenceResponse([token]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
