"""What the texts nearest to an embedding stand for, and their cosines."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.answers = json.loads((folder / "texts.json").read_text())  # text -> what it stands for
        self.k = int(json.loads(args["model_config"])["parameters"]["k"]["string_value"])
        self.table = None

    def embeddings(self):
        texts = pb_utils.Tensor("TEXT", np.array([[text.encode()] for text in self.answers], np.object_))
        call = pb_utils.InferenceRequest(model_name="embed", inputs=[texts], requested_output_names=["EMBEDDING"])
        response = call.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "EMBEDDING").as_numpy()

    def execute(self, requests):
        if self.table is None:
            self.table = self.embeddings()
        return [self.nearest(request) for request in requests]

    def nearest(self, request):
        cosines = pb_utils.get_input_tensor_by_name(request, "EMBEDDING").as_numpy() @ self.table.T
        best = np.argsort(-cosines, axis=1)[:, : self.k]
        answers = np.array([answer.encode() for answer in self.answers.values()], np.object_)
        scores = np.take_along_axis(cosines, best, axis=1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXTS", answers[best]), pb_utils.Tensor("SCORES", scores)])
