import numpy as np
import triton_python_backend_utils as pb_utils

RATE_HZ, FRAME = 8000, 400  # samples, 50 ms
LOW_HZ, HIGH_HZ = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = {(low, high): "123456789*0#"[3 * i + j] for i, low in enumerate(LOW_HZ) for j, high in enumerate(HIGH_HZ)}
ORDERS = {"12": "Order 12 left us yesterday.", "305": "Order 305 is being packed."}


def key_of(frame):
    """Key whose two tones a frame has; "" in a pause."""
    if np.abs(frame).max() < 0.1:
        return ""
    turns = np.exp(-2j * np.pi * np.outer((*LOW_HZ, *HIGH_HZ), np.arange(FRAME)) / RATE_HZ)
    power = np.abs(turns @ frame)
    return KEYS[LOW_HZ[power[:4].argmax()], HIGH_HZ[power[4:].argmax()]]


def utterances(audio):
    """Keys between pauses of 200 ms, as soon as each is over."""
    text, last, pause = "", "", 0
    for key in [*map(key_of, audio[: len(audio) // FRAME * FRAME].reshape(-1, FRAME)), "", "", "", ""]:
        text, pause = text + (key if key != last else ""), 0 if key else pause + 1
        last = key
        if text and pause == 4:
            yield text
            text = ""


class TritonPythonModel:
    def initialize(self, args):
        self.execute = getattr(self, args["model_name"])

    def listen(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for text in utterances(pb_utils.get_input_tensor_by_name(request, "AUDIO").as_numpy()):
                heard = pb_utils.Tensor("TEXT", np.array([text.encode()], np.object_))
                sender.send(pb_utils.InferenceResponse([heard]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def order_status(self, requests):
        return [self.status(request) for request in requests]

    def status(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        if text not in ORDERS:
            unknown = pb_utils.TritonError(f"there is no order {text}", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=unknown)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", np.array([ORDERS[text].encode()], np.object_))])
