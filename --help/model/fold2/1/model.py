import numpy as np
import triton_python_backend_utils as pb_utils
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier


class TritonPythonModel:
    def initialize(self, args):
        pixels, labels = load_digits(return_X_y=True)
        is_in_fold = np.arange(len(labels)) % 5 != int(args["model_name"][-1])
        self.model = KNeighborsClassifier(n_neighbors=5).fit(pixels[is_in_fold], labels[is_in_fold])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pixels = pb_utils.get_input_tensor_by_name(request, "PIXELS").as_numpy()
        probs = self.model.predict_proba(pixels.reshape(len(pixels), 64)).astype(np.float32)
        label = pb_utils.Tensor("LABEL", probs.argmax(axis=1)[:, None])
        return pb_utils.InferenceResponse([label, pb_utils.Tensor("PROBS", probs)])
