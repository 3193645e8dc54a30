"""Safe loading of ``.pt2`` files: archives are inspected before torch loads them.

A ``.pt2`` of ``torch.export.save`` is an archive of a graph in JSON and of weights as raw bytes. ``torch.export.load``
also unpickles entries that the archive declares as pickled, and maps native code of AOTInductor; such archives are
rejected. The remaining ones still contain symbolic expressions that torch evaluates: load only files from sources whose
code you would run.
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError

_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"
_MODEL = "models/model.json"
_CURE = "export the model with torch.export.export and torch.export.save"


def load_program(torch: Any, path: Path) -> Any:
    """Load the ``ExportedProgram`` in a file that ends in ``.pt2``, on the devices it was exported on.

    Raises:
        InvalidArgumentError: The file is not such an archive, or needs pickle or native code.
    """
    if path.suffix != ".pt2":
        raise InvalidArgumentError(f"{path}: only .pt2 files are loaded, not TorchScript or pickled modules; {_CURE}")
    try:
        _check_archive(torch, path)
        return torch.export.load(str(path))
    except InvalidArgumentError:
        raise
    except Exception as error:  # torch raises many kinds on a broken file
        raise InvalidArgumentError(f"torch {torch.__version__} cannot load {path}: {error}") from error


def _check_archive(torch: Any, path: Path) -> None:
    """Reject entries that torch would unpickle or map as code. Uses torch's own reader, so that both see the same."""
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        names = set(reader.get_all_records())
        is_archive = {_MODEL, _SAMPLE_INPUTS, *_CONFIGS} <= names and reader.get_record("archive_format") == b"pt2"
    except RuntimeError:
        is_archive = False
    if not is_archive or "version" in zipfile.ZipFile(path).namelist():  # at the top level: the format before torch 2.8
        raise InvalidArgumentError(f"{path} is not an archive of torch.export.save; {_CURE}")
    for name in sorted(names):
        if name.startswith("data/aotinductor/"):
            raise InvalidArgumentError(
                f"{path} holds native code of AOTInductor, which is not supported by this version; {_CURE}"
            )
        if (name.startswith("models/") or name.endswith(".pt")) and name not in (_MODEL, _SAMPLE_INPUTS):
            raise InvalidArgumentError(f"{path} holds '{name}', which torch would unpickle; {_CURE}")
    for config in _CONFIGS:
        for name, entry in json.loads(reader.get_record(config))["config"].items():
            if entry.get("use_pickle") or not entry["path_name"].startswith(("weight_", "tensor_")):
                raise InvalidArgumentError(f"{path}: '{name}' is pickled, and pickles are not loaded; {_CURE}")
    try:
        torch.load(io.BytesIO(reader.get_record(_SAMPLE_INPUTS)), weights_only=True)
    except Exception as error:
        raise InvalidArgumentError(f"{path}: the sample inputs are pickled objects, not tensors; {_CURE}") from error
