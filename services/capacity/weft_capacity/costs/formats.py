"""Which module knows the cost of which backend's models."""

from pathlib import Path

from weft_capacity.costs.operation import CostModel
from weft_common.errors import NotFoundError, UnsupportedError
from weft_common.signature import ModelSignature

#: File of a version folder by backend, unless the configuration names another.
FILENAMES = {"onnxruntime": "model.onnx", "pytorch": "model.pt2"}


def cost_model(backend: str, file: Path, signature: ModelSignature) -> CostModel | None:
    """The cost of a model in a file; None: of this backend's models nothing can be known from outside.

    Raises:
        NotFoundError: The file is not there.
        InvalidArgumentError: It is no such model.
        UnsupportedError: What reads it is not installed.
    """
    if backend not in FILENAMES:
        return None
    if not file.is_file():
        raise NotFoundError(f"there is no {file}; build or fetch the model")
    try:
        if backend == "onnxruntime":
            from weft_capacity.costs.onnx_model import OnnxModel  # noqa: PLC0415  # optional, and slow to import

            return OnnxModel(file, signature)
        from weft_capacity.costs.torch_model import TorchModel  # noqa: PLC0415  # same

        return TorchModel(file, signature)
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, without which {file} cannot be read; pip install 'weft[plan,model]'"
        ) from error
