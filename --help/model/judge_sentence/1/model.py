import re

import numpy as np
import triton_python_backend_utils as pb_utils

PRIVATE, SECRET = re.compile(r"\S+@\S+"), re.compile("password")


def judge_sentence(text):
    return "VERDICT", "secret" if SECRET.search(text) else "private" if PRIVATE.search(text) else "fine"


def pass_on(text):
    return "text_output", text


def black_out(text):
    return "text_output", PRIVATE.sub("[...]", text)


def refuse(text):
    raise ValueError("the answer was stopped: its next sentence is not to be told")


class TritonPythonModel:
    def initialize(self, args):
        self.function = globals()[args["model_name"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            text = pb_utils.get_input_tensor_by_name(request, "SENTENCE").as_numpy()[0].decode()
            name, text = self.function(text)
        except ValueError as error:
            denied = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=denied)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([text.encode()], np.object_))])
