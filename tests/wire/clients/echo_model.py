"""A model service whose model returns what it is given."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """
backend: "python"
parameters { key: "EXECUTION" value { string_value: "thread" } }
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""


@contextmanager
def running_echo_model(wire: str, folder: Path, *arguments: str) -> Iterator[str]:
    """The address of a model service with the model ``echo``: OUTPUT0 is INPUT0, UINT8 of any length.

    Args:
        wire: ``weft`` or ``grpcio``.
        folder: Where its repository goes; there may be one.
        arguments: Of ``weft.services.model``, more.

    Raises:
        AssertionError: It ends with another status than 0.
    """
    version = folder / "echo" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(MODEL)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG)
    command = [
        sys.executable, "-P", "-m", "weft.services.model", "--repository", str(folder), "--metrics-port", "0",
        "--wire", wire,
        "--stop-with-stdin", "--log-level", "error", *(arguments or ("--grpc-port", "0")),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["grpc"])
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
