"""Which module knows the cost of which backend's models."""

from pathlib import Path

from weft.base.errors import NotFoundError, UnsupportedError
from weft.base.signature import ModelSignature
from weft.capacity.costs.operation import CostModel

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
            from weft.capacity.costs.onnx_model import OnnxModel  # noqa: PLC0415  # optional, and slow to import

            return OnnxModel(file, signature)
        from weft.capacity.costs.torch_model import TorchModel  # noqa: PLC0415  # same

        return TorchModel(file, signature)
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, without which {file} cannot be read; pip install 'weft-mesh[plan,model]'"
        ) from error
