import re

import numpy as np
import triton_python_backend_utils as pb_utils


def words(text):
    return {word[:4] for word in re.findall(r"\w{4,}", text.decode().lower())}


def allowed(question):
    if b"password" in question[0].lower():
        raise ValueError("questions about passwords are not answered")
    return {"ALLOWED": np.array([True])}


def cross_score(question, passage):
    rows = zip(question[:, 0], passage[:, 0], strict=True)
    return {"SCORE": np.array([[len(words(q) & words(p))] for q, p in rows], np.float32)}


def best_passage(passages, ranks):
    return {"SOURCE": passages[[ranks[:, 0].argmax()]]}


class TritonPythonModel:
    def initialize(self, args):
        self.function = globals()[args["model_name"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            arrays = self.function(**{tensor.name().lower(): tensor.as_numpy() for tensor in request.inputs()})
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
