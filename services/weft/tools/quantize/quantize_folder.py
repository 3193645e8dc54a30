"""Quantises a folder, and reports the loss."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnsupportedError
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.weights.folder_source import FolderSource, weight_format
from weft.llm.weights.gguf import find_gguf
from weft.llm.weights.parts import LM_HEAD, Part, Piece, is_matrix
from weft.tools.quantize.calibration import calibrated, evaluate, quantize_gptq, read_rows
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import NF4_VALUES, quantize_linear, quantize_nf4


def quantized_tensors(module: str, weight: QuantizedWeight, *, is_nf4: bool) -> dict[str, Tensor]:
    """The tensors of a module in bitsandbytes' NF4, or in compressed-tensors' ``pack-quantized``; see their readers."""
    if is_nf4:
        codes, name = weight.unpacked().t().reshape(-1), f"{module}.weight"
        shape = list(weight.shape)
        state = {"quant_type": "nf4", "blocksize": weight.group_size, "dtype": "float32", "shape": shape}
        return {
            name: (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
            f"{name}.absmax": weight.scales.t().reshape(-1).float(),
            f"{name}.quant_map": torch.tensor(NF4_VALUES),
            f"{name}.quant_state.bitsandbytes__nf4": torch.frombuffer(
                bytearray(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
    tensors = {
        f"{module}.weight_packed": _words(weight.unpacked().t(), weight.num_bits),
        f"{module}.weight_scale": weight.scales.t().contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        missing = -weight.shape[0] % (32 // weight.num_bits)
        zeros = torch.nn.functional.pad(weight.zeros.to(torch.uint8), (0, missing))
        tensors[f"{module}.weight_zero_point"] = _words(zeros, weight.num_bits).t().contiguous()
    return tensors


def quantization_config(weight: QuantizedWeight, *, is_nf4: bool) -> dict[str, Any]:
    """``quantization_config`` of folders whose linear layers but the LM head are stored like ``weight``."""
    if is_nf4:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        }
    is_whole = weight.group_size == weight.shape[1]
    weights = {
        "num_bits": weight.num_bits,
        "type": "int",
        "symmetric": weight.zeros is None,
        "strategy": "channel" if is_whole else "group",
        "group_size": None if is_whole else weight.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _words(codes: Tensor, num_bits: int) -> Tensor:
    """int32 words of uint8 codes along the last axis, the first in the lowest bits."""
    narrow = codes[:, ::2] | codes[:, 1::2] << 4 if num_bits == 4 else codes
    return narrow.contiguous().view(torch.int32)


_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_SHARD_BYTES = 2**31


class FolderWriter:
    """Writes to a hidden folder beside ``output``; ``finish`` renames it; leaving the ``with`` block removes it.

    Args:
        output: Must not exist, but its parent folder must.
        source: Folder whose other files are copied.

    Raises:
        AlreadyExistsError: ``output`` exists.
        NotFoundError: Its parent folder does not.
        OSError: It cannot be written.
    """

    def __init__(self, output: Path, source: Path) -> None:
        if output.exists():
            raise _exists(output)
        if not output.absolute().parent.is_dir():
            raise NotFoundError(f"no folder {output.absolute().parent}, which --output should be in; make it")
        self._output = output
        self.path = output.with_name(f".{output.name}.{os.getpid()}")
        self._tensors: dict[str, Tensor] = {}
        self._index: dict[str, str] = {}
        self._num_bytes = 0
        self.path.mkdir()
        try:
            for file in source.iterdir():
                if file.is_file() and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, self.path / file.name)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors, or keep them until a file is full."""
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._num_bytes >= _SHARD_BYTES:
            self._flush()

    def close(self, config: dict[str, Any]) -> None:
        """Write the remaining tensors, and ``config.json``."""
        if not self._index:
            self._flush("model.safetensors")
        else:
            if self._tensors:
                self._flush()
            index = {"metadata": {}, "weight_map": self._index}
            (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in self.path.glob("*.safetensors"):
            shutil.copymode(self.path / "config.json", file)  # safetensors' own is for the owner alone

    def finish(self) -> None:
        """Rename the folder to ``output``.

        Raises:
            AlreadyExistsError: Another program has created ``output`` meanwhile.
        """
        try:
            self.path.rename(self._output)
        except OSError as error:
            if self._output.exists():
                raise _exists(self._output) from error
            raise

    def _flush(self, filename: str = "") -> None:
        filename = filename or f"model-{len(set(self._index.values())) + 1:05}.safetensors"
        try:
            save_file(self._tensors, self.path / filename, {"format": "pt"})
        except SafetensorError as error:  # of a full disk, for one
            raise OSError(f"cannot write {filename} beside {self._output}: {error}") from error
        self._index |= dict.fromkeys(self._tensors, filename)
        self._tensors, self._num_bytes = {}, 0


def _exists(output: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{output} exists; nothing was done. Remove it, or give another --output")


REPORT_FILENAME = "report.json"
#: Inputs that share a scale, by method; 0: all inputs of an output.
GROUP_SIZES = {"int8": 0, "int4": 32, "nf4": 64, "gptq": 32}
_SMALLEST_NORMAL_HALF = 2.0**-14


@dataclass(frozen=True)
class QuantizationReport:
    """Result of a quantisation.

    Attributes:
        num_calibration_tokens, num_held_out_tokens: Tokens for the method, and for the measurement.
        perplexity_before, perplexity_after: Of the held-out text; ``loss`` is the rise as a share.
        agreement: Share of positions with the same likeliest token, 0 to 1.
        weight_error: Frobenius norm of all errors of quantised weights, relative to that of the weights.
        bytes_before, bytes_after: Size of the weights' files.
        bits_per_weight: Of quantised matrices, scales included.
    """

    method: str
    group_size: int
    num_calibration_tokens: int
    num_held_out_tokens: int
    perplexity_before: float
    perplexity_after: float
    loss: float
    agreement: float
    weight_error: float
    bytes_before: int
    bytes_after: int
    bits_per_weight: float


class LossAboveLimitError(UnsupportedError):
    """The loss is above the limit; nothing was written. ``report`` is of the rejected result."""

    def __init__(self, report: QuantizationReport, max_loss: float) -> None:
        self.report = report
        super().__init__(
            f"the perplexity would rise by {report.loss:.2%}, and --max-loss is {max_loss:.2%}; nothing was written. "
            f"Take a smaller --group-size or a method of more bits, or raise --max-loss"
        )


def quantize_folder(
    folder: Path, data: Path, output: Path, *, method: str, group_size: int | None = None, max_loss: float
) -> QuantizationReport:
    """Write a folder with quantised linear layers, embedding and LM head as they are, unless the loss is too large.

    Args:
        folder: A Hugging Face folder with ``tokenizer.json``, not quantised.
        data: Text like that which the model is for; see ``read_rows``. Its last fifth is held out.
        output: Must not exist. Gets the files of ``folder``, the new weights, and ``report.json``.
        method: A key of ``GROUP_SIZES``. ``gptq``: 4 bits, chosen by the inputs of each layer.
        group_size: Inputs that share a scale; 0: all inputs of an output; None: as ``GROUP_SIZES``.
        max_loss: Largest rise of the perplexity, as a share.

    Raises:
        LossAboveLimitError: The loss is larger.
        AlreadyExistsError, NotFoundError: ``output`` exists, or a file is missing.
        InvalidArgumentError: The folder is quantised already or no model that can be served, the data is too short,
            or the group size does not fit.
        UnsupportedError: Experts are stored together.
        OSError: A file cannot be read or written.
    """
    if find_gguf(folder) is not None or weight_format(folder) is not None:
        raise InvalidArgumentError(f"{folder} is quantised already; take the folder of the model before it was")
    config = read_config(folder)
    if any(part.stored for parts in config.weight_parts().values() for part in parts):
        raise UnsupportedError(
            f"{config.name} has all experts of a layer in one tensor, for which no method writes codes; serve it with "
            f"the parameter quantization, which rounds weights as they load"
        )
    size = GROUP_SIZES[method] if group_size is None else group_size
    _check_groups(config, method, size)
    rows = read_rows(data, folder, config.max_context_len)
    with FolderWriter(output, folder) as writer, torch.no_grad():
        before = evaluate(_model(folder, config), rows.held_out)
        work = _Work(folder, config, method, size)
        work.write(writer, rows.calibration)
        after = evaluate(_model(writer.path, read_config(writer.path)), rows.held_out)
        report = QuantizationReport(
            method=method,
            group_size=size,
            num_calibration_tokens=sum(map(len, rows.calibration)) if method == "gptq" else 0,
            num_held_out_tokens=sum(map(len, rows.held_out)),
            perplexity_before=before.perplexity,
            perplexity_after=after.perplexity,
            loss=after.perplexity / before.perplexity - 1,
            agreement=before.agreement(after),
            weight_error=work.error,
            bytes_before=_weights_bytes(folder),
            bytes_after=_weights_bytes(writer.path),
            bits_per_weight=work.bits_per_weight,
        )
        if not report.loss <= max_loss:
            raise LossAboveLimitError(report, max_loss)
        (writer.path / REPORT_FILENAME).write_text(json.dumps(asdict(report), indent=2) + "\n")
        writer.finish()
    return report


def _model(folder: Path, config: TransformerConfig) -> TransformerModel:
    return TransformerModel(config, load_folder(folder, config, dtype=torch.float32))


class _Work:
    """Rounds and writes the weights of a folder, and accumulates the errors."""

    def __init__(self, folder: Path, config: TransformerConfig, method: str, group_size: int) -> None:
        self._folder = folder
        self._config = config
        self._method = method
        self._group_size = group_size
        self._squared_error = self._squared_norm = 0.0
        self._num_bits = self._num_weights = 0

    @property
    def error(self) -> float:
        return float((self._squared_error / self._squared_norm) ** 0.5)

    @property
    def bits_per_weight(self) -> float:
        return self._num_bits / self._num_weights

    def write(self, writer: FolderWriter, calibration: list[Tensor]) -> None:
        layout, is_nf4 = self._config.weight_parts(), self._method == "nf4"
        with FolderSource.open(self._folder) as source:
            source.check([part for parts in layout.values() for part in parts], self._config.derived_tensors())

            def read(name: str) -> Tensor:
                return torch.cat([_stored(source, part).float() for part in layout[name]])

            for name, parts in layout.items():
                if not _is_rounded(name):
                    writer.add({part.name: _stored(source, part) for part in parts})
            last = None
            for name, weight in self._rounded(read, list(filter(_is_rounded, layout)), calibration):
                row = 0
                for part in layout[name]:
                    module, end = part.name.removesuffix(".weight"), row + part.shape[0]
                    writer.add(quantized_tensors(module, weight.outputs(row, end), is_nf4=is_nf4))
                    row = end
                last = weight
        config = json.loads((self._folder / "config.json").read_bytes())
        assert last is not None  # noqa: S101  # a model has a layer
        writer.close(config | {"quantization_config": quantization_config(last, is_nf4=is_nf4)})

    def _rounded(
        self, read: Callable[[str], Tensor], names: list[str], calibration: list[Tensor]
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        def by_inputs(name: str, weight: Tensor, hessian: Tensor) -> QuantizedWeight:
            return self._counted(weight, quantize_gptq(weight, hessian, self._alone(weight)))

        if self._method == "gptq":
            yield from calibrated(self._config, read, calibration, by_inputs)
            return
        for name in names:
            weight = read(name)
            yield name, self._counted(weight, self._alone(weight))

    def _alone(self, weight: Tensor) -> QuantizedWeight:
        """Round each element to its nearest code."""
        if self._method == "nf4":
            return quantize_nf4(weight, self._group_size)
        num_bits, is_symmetric = (8, True) if self._method == "int8" else (4, False)
        quantize = partial(quantize_linear, weight, num_bits, self._group_size, is_symmetric=is_symmetric)
        rounded = quantize(scales_dtype=torch.float16)
        return rounded if float(rounded.scales.min()) >= _SMALLEST_NORMAL_HALF else quantize()

    def _counted(self, weight: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
        self._squared_error += float((rounded.dequantize() - weight).double().square().sum())
        self._squared_norm += float(weight.double().square().sum())
        self._num_weights += weight.numel()
        zeros_bits = 0 if rounded.zeros is None else rounded.zeros.numel() * rounded.num_bits
        self._num_bits += (rounded.codes.nbytes + rounded.scales.nbytes) * 8 + zeros_bits
        return rounded


def _is_rounded(name: str) -> bool:
    return is_matrix(name) and name != LM_HEAD


def _stored(source: FolderSource, part: Part) -> Tensor:
    weight = source.read(Piece(part))
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def _check_groups(config: TransformerConfig, method: str, group_size: int) -> None:
    for name, parts in config.weight_parts().items():
        inputs = parts[0].shape[-1]
        if _is_rounded(name) and (inputs % (group_size or inputs) or inputs % 8 or group_size % 2):
            raise InvalidArgumentError(
                f"--group-size must be even and divide the {inputs} inputs of '{name}', which must be a multiple of 8, "
                f"got {group_size} for method {method}; give another, or 0 for one scale for each output"
            )


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
