"""Safe loading of ``.pt2`` files: archives are inspected before torch loads them.

A ``.pt2`` of ``torch.export.save`` is an archive of a graph in JSON and of weights as raw bytes. ``torch.export.load``
also unpickles entries that the archive declares as pickled, and maps native code of AOTInductor; such archives are
rejected. The remaining ones still contain symbolic expressions that torch evaluates: load only files from sources whose
code you would run. Inputs and outputs are read from the JSON, which needs no torch.
"""

import io
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.backends.contract import FileTensor
from weft.base.errors import InvalidArgumentError

_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"
_MODEL = "models/model.json"
_CURE = "export the model with torch.export.export and torch.export.save"
#: V2 datatypes by the numbers of torch's schema.
_DATATYPES = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
_DICT = "builtins.dict"
#: What is raised for a file that is no archive, or whose entries cannot be read.
_TORN = (zipfile.BadZipFile, IndexError, OSError, RuntimeError)
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^()]*\)")


class ProgramTensors(NamedTuple):
    """Arguments and results of a program, in order.

    Attributes:
        has_keys: The module returns a dict, whose keys are the names of the results.
        max_rows: The most that the first dimension of each argument may be.
    """

    arguments: Sequence[FileTensor]
    results: Sequence[FileTensor]
    has_keys: bool
    max_rows: Sequence[int]


def read_program(path: Path) -> ProgramTensors:
    """Inspect a file without torch, and read what its program takes and gives. Raises as ``load_program``."""
    _check_suffix(path)
    try:
        with zipfile.ZipFile(path) as archive:
            folder = archive.namelist()[0].partition("/")[0] + "/"
            names = {name.removeprefix(folder) for name in archive.namelist()}
            return _inspect(path, names, lambda name: archive.read(folder + name))
    except _TORN as error:
        raise _no_archive(path) from error


def load_program(torch: Any, path: Path) -> Any:
    """Load the ``ExportedProgram`` in a file that ends in ``.pt2``, on the devices it was exported on.

    Raises:
        InvalidArgumentError: The file is not such an archive, or needs pickle or native code.
    """
    _check_suffix(path)
    try:
        reader = torch._C.PyTorchFileReader(str(path))  # torch's own, so that both see the same
        _inspect(path, set(reader.get_all_records()), reader.get_record)
    except _TORN as error:
        raise _no_archive(path) from error
    try:
        torch.load(io.BytesIO(reader.get_record(_SAMPLE_INPUTS)), weights_only=True)
    except Exception as error:
        raise InvalidArgumentError(f"{path}: the sample inputs are pickled objects, not tensors; {_CURE}") from error
    try:
        return torch.export.load(str(path))
    except Exception as error:  # torch raises many kinds on a broken file
        raise InvalidArgumentError(f"torch {torch.__version__} cannot load {path}: {error}") from error


def _check_suffix(path: Path) -> None:
    if path.suffix != ".pt2":
        raise InvalidArgumentError(f"{path}: only .pt2 files are loaded, not TorchScript or pickled modules; {_CURE}")


def _no_archive(path: Path) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} is not an archive of torch.export.save; {_CURE}")


def _inspect(path: Path, names: set[str], read: Callable[[str], bytes]) -> ProgramTensors:
    """Reject entries that torch would unpickle or map as code, then read the tensors."""
    is_archive = {"archive_format", _MODEL, _SAMPLE_INPUTS, *_CONFIGS} <= names and read("archive_format") == b"pt2"
    if not is_archive or "version" in zipfile.ZipFile(path).namelist():  # at the top level: the format before torch 2.8
        raise _no_archive(path)
    for name in sorted(names):
        if name.startswith("data/aotinductor/"):
            raise InvalidArgumentError(
                f"{path} holds native code of AOTInductor, which is not supported by this version; {_CURE}"
            )
        if (name.startswith("models/") or name.endswith(".pt")) and name not in (_MODEL, _SAMPLE_INPUTS):
            raise InvalidArgumentError(f"{path} holds '{name}', which torch would unpickle; {_CURE}")
    try:
        for config in _CONFIGS:
            for name, entry in json.loads(read(config))["config"].items():
                if entry.get("use_pickle") or not entry["path_name"].startswith(("weight_", "tensor_")):
                    raise InvalidArgumentError(f"{path}: '{name}' is pickled, and pickles are not loaded; {_CURE}")
                if f"{config.rpartition('/')[0]}/{entry['path_name']}" not in names:
                    raise InvalidArgumentError(f"{path}: the values of '{name}' are missing; {_CURE}")
        return _tensors(path, json.loads(read(_MODEL)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: its program cannot be read: {error!r}; {_CURE}") from error


def _tensors(path: Path, program: Mapping[str, Any]) -> ProgramTensors:
    module = program["graph_module"]
    values, signature = module["graph"]["tensor_values"], module["signature"]
    of_inputs = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    of_outputs = [spec["user_output"]["arg"] for spec in signature["output_specs"] if "user_output" in spec]
    if not all("as_tensor" in argument for argument in (*of_inputs, *of_outputs)):
        raise InvalidArgumentError(f"{path}: every argument and result of the exported module must be a tensor")
    arguments, results = ([one["as_tensor"]["name"] for one in given] for given in (of_inputs, of_outputs))
    call = module["module_call_graph"][0]["signature"]
    names = call.get("forward_arg_names") or ()
    root = json.loads(call["out_spec"])[1]
    keys = json.loads(root["context"]) if root["type"] == _DICT else ()
    has_keys = len(keys) == len(results) > 0
    names, keys = names if len(names) == len(arguments) else arguments, keys if has_keys else results
    limits = program["range_constraints"]
    return ProgramTensors(
        [_tensor(name, values[argument]) for name, argument in zip(names, arguments, strict=True)],
        [_tensor(str(key), values[result]) for key, result in zip(keys, results, strict=True)],
        has_keys,
        [_max_rows(values[argument]["sizes"], limits) for argument in arguments],
    )


def _tensor(name: str, value: Mapping[str, Any]) -> FileTensor:
    dtype = value["dtype"]
    shape = tuple(size.get("as_int", -1) for size in value["sizes"])
    return FileTensor(name, _DATATYPES.get(dtype, f"of torch's type {dtype}"), shape)


def _max_rows(sizes: Sequence[Mapping[str, Any]], limits: Mapping[str, Mapping[str, int | None]]) -> int:
    if not sizes:
        return 0
    if "as_int" in sizes[0]:
        return int(sizes[0]["as_int"])
    symbol = _SYMBOL.fullmatch(sizes[0]["as_expr"]["expr_str"])
    limit = limits.get(symbol[1], {}).get("max_val") if symbol else None
    return sys.maxsize if limit is None else min(limit, sys.maxsize)
