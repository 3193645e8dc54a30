"""Reads weights from the safetensors files of a Hugging Face folder, quantised or not."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.checkpoint import Checkpoint, Module, StoredTensor, WeightFormat
from weft.llm.weights.parts import Part, Piece, read_object

if TYPE_CHECKING:
    from weft.llm.weights.codes import ReadWeight

#: AutoGPTQ's file beside ``config.json``, which early versions did not write to.
_GPTQ_FILE = "quantize_config.json"
_MAX_DIGITS = 10
_NUM_BITS = (4, 8)  # of the kernels
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def weight_format(path: Path) -> WeightFormat | None:
    """The quantisation format of a Hugging Face folder; None if its weights are plain numbers.

    Raises:
        InvalidArgumentError: A file is not JSON, or the method or one of its settings is not supported.
    """
    config = (read_object(path / "config.json") or {}).get("quantization_config")
    if config is None and (own := read_object(path / _GPTQ_FILE)) is not None:
        config = {"quant_method": "gptq", **own}
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise _fault("quantization_config", "an object", config)
    method = config.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in config else None)
    if not isinstance(method, str) or method not in _METHODS:
        raise _fault("quantization_config.quant_method", f"one of {', '.join(_METHODS)}", method)
    return _METHODS[method](config)


def _format(module: str, name: str, *arguments: Any, **options: Any) -> WeightFormat:
    """Make a reader, whose module imports torch: without one, headers are checked without torch."""
    made: WeightFormat = getattr(import_module(f"weft.llm.weights.formats.{module}"), name)(*arguments, **options)
    return made


def _gptq(config: Mapping[str, Any]) -> WeightFormat:
    version = config.get("checkpoint_format", "gptq")
    _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), version)
    options = {"is_v2": version == "gptq_v2", "has_order": config.get("desc_act") is True}
    return _format("gptq", "Gptq", _bits(config, "bits", _NUM_BITS), **options)


def _awq(config: Mapping[str, Any]) -> WeightFormat:
    _bits(config, "bits" if "bits" in config else "w_bit", (4,))
    _one_of(config, "version", ("gemm", "GEMM"), config.get("version", "gemm"))
    return _format("awq", "Awq")


def _bitsandbytes(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return _format("bitsandbytes", "BitsAndBytes8")
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise _fault("quantization_config.load_in_4bit", "true, or load_in_8bit", config.get("load_in_4bit"))
    _one_of(config, "bnb_4bit_quant_storage", ("uint8",), config.get("bnb_4bit_quant_storage") or "uint8")
    return _format("bitsandbytes", "BitsAndBytes4")


def _float8(config: Mapping[str, Any]) -> WeightFormat:
    block = config.get("weight_block_size")
    if block is None:
        return _format("float8", "Float8")
    if not isinstance(block, list) or len(block) != 2 or any(type(side) is not int or side < 1 for side in block):
        raise _fault("quantization_config.weight_block_size", "two whole numbers above 0", block)
    return _format("float8", "Float8", (block[0], block[1]))


def _compressed_tensors(config: Mapping[str, Any]) -> WeightFormat:
    _one_of(config, "format", _COMPRESSED_FORMATS, config.get("format"))
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _fault("quantization_config.sparsity_config", "absent or of format dense", sparsity)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _fault("quantization_config.config_groups", "an object of objects", groups)
    float8 = _float8({})
    for name, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise _fault(f"quantization_config.config_groups.{name}.weights", "an object", weights)
        _bits(weights, "num_bits", _NUM_BITS)
        block = weights.get("block_structure")
        if isinstance(block, str):  # "128x128"
            block = [int(side) if side.isdecimal() and len(side) < _MAX_DIGITS else 0 for side in block.split("x")]
        if block is not None:
            float8 = _float8({"weight_block_size": block})
    return _format("compressed_tensors", "CompressedTensors", float8)


_METHODS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _float8,
    "fbgemm_fp8": _float8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda config: _format("mxfp4", "Mxfp4"),
}


def _bits(config: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    bits = config.get(name)
    if type(bits) is not int or bits not in allowed:
        raise _fault(f"quantization_config.{name}", " or ".join(map(str, allowed)), bits)
    return bits


def _one_of(config: Mapping[str, Any], name: str, allowed: tuple[str, ...], got: object) -> None:
    if got not in allowed:
        raise _fault(f"quantization_config.{name}", f"one of {', '.join(allowed)}", got)


def _fault(name: str, allowed: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"config.json: {name} must be {allowed}, got {got!r}; take another quantisation of the model, or the model "
        f"before it was quantised"
    )


_WEIGHT = ".weight"


class FolderSource:
    """Reads weights one at a time. Created by ``open``."""

    def __init__(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> None:
        self._checkpoint = checkpoint
        self._format = weight_format
        self.format_name = "none" if weight_format is None else weight_format.name  # for the log

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, has_values: bool = True) -> Iterator[Self]:
        """Open the files of the folder; leaving the ``with`` block closes them. Raises as ``Checkpoint.open``."""
        found = weight_format(path)
        with Checkpoint.open(path, has_values=has_values) as checkpoint:
            yield cls(checkpoint, found)

    def check(self, parts: Iterable[Part], ignored: Iterable[str]) -> None:
        """Validate the tensors of all ``parts`` of the model; ``ignored`` ones may be present as well.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        wanted: dict[str, StoredTensor] = {}
        surplus = list(ignored)
        for part in parts:
            module = self._quantized(part)
            if self._format is None or module is None:
                wanted[part.name] = StoredTensor(part.stored or part.shape)
            else:
                wanted |= {module.path(name): stored for name, stored in self._format.tensors(module).items()}
                surplus += [module.path(name) for name in self._format.ignored]
        self._checkpoint.check(wanted, surplus)
        for name in surplus:
            is_bias = name.endswith(".bias") and name not in wanted and self._checkpoint.find(name) is not None
            if is_bias and self._checkpoint.has_values and self._checkpoint.read(name).count_nonzero():
                raise InvalidArgumentError(
                    f"weights: '{name}' must be zeros or absent, since the model has no such bias, got other numbers; "
                    f"config.json and the weights are of different models"
                )

    def is_quantized(self, part: Part) -> bool:
        """Whether the weight is quantised."""
        return self._quantized(part) is not None

    def read(self, piece: Piece) -> "ReadWeight":
        """The piece of a weight, on the CPU; unquantised ones in their stored type, of which no more is read."""
        part = piece.part
        module = self._quantized(part)
        if self._format is not None and module is not None:
            from weft.llm.weights.codes import cut  # noqa: PLC0415  # imports torch

            return cut(self._format.read(module), piece)
        numbers = self._checkpoint.read(part.name, piece.cuts)
        return part.rows(numbers.transpose(1, -1)) if part.stored else numbers

    def _quantized(self, part: Part) -> Module | None:
        """The module of a quantised weight."""
        if self._format is None or not (part.name.endswith(_WEIGHT) or part.stored) or len(part.shape) != 2:
            return None
        module = Module(part.name.removesuffix(_WEIGHT), (part.shape[0], part.shape[1]), self._checkpoint, part)
        return module if self._format.is_quantized(module) else None
