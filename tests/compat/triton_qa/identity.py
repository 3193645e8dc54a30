"""Answers inputs as they came: in place of Triton's ``identity`` backend, which its tests use and Weft has not."""

import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        values = {name: value["string_value"] for name, value in parameters.items()}
        time.sleep(int(values.get("creation_delay_sec", "0")))
        self.delay_s = int(values.get("execute_delay_ms", "0")) / 1000

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(i.name().replace("INPUT", "OUTPUT"), i.as_numpy()) for i in request.inputs()]
            )
            for request in requests
        ]
