"""Reader of GGUF files: metadata, and the bytes of each tensor.

It is safe for untrusted files; the package ``gguf`` is not: a wrong length (2^60 strings) makes it loop for ever. Tests
write files with that package.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from weft.base.errors import InvalidArgumentError, NotFoundError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Format of struct for each type of number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
#: Types of tensors of plain numbers.
PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
_SAFETENSORS = "*.safetensors"


class GgufTensor(NamedTuple):
    """A tensor's shape, slowest dimension first, block type, and offset in the file."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors files, else None.

    Raises:
        InvalidArgumentError: There are several.
    """
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if not files or any(folder.glob(_SAFETENSORS)):
        return None
    if len(files) > 1:
        raise InvalidArgumentError(
            f"{folder} must have one .gguf file, got {len(files)}: {files[0].name}, {files[1].name}; leave one there, "
            f"or join the parts of a model with llama-gguf-split --merge"
        )
    return files[0]


class GgufFile:
    """An open file. Created by ``open``.

    Attributes:
        metadata: Values by key; arrays of numbers as numpy's, of strings as lists.
    """

    def __init__(self, name: str, data: mmap.mmap | bytes) -> None:
        self.name = name
        self._data = data
        self._at = 0
        try:
            self.metadata, self.tensors = self._parsed()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._torn(str(error)) from error

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Read the metadata; leaving the ``with`` block closes the file.

        Raises:
            NotFoundError: There is no such file.
            InvalidArgumentError: It is no GGUF file, or it is truncated.
        """
        with ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("rb"))
                data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except FileNotFoundError as error:
                raise NotFoundError(f"no file {path}") from error
            except ValueError as error:  # mmap's for an empty file
                raise InvalidArgumentError(f"{path} must be a GGUF file, got an empty one; fetch it again") from error
            yield cls(path.name, data)

    def read(self, tensor: GgufTensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy of the first ``num_bytes`` of the tensor, which ``check_size`` has passed."""
        return np.frombuffer(self._data, np.uint8, num_bytes, tensor.offset).copy()

    def check_size(self, name: str, num_bytes: int) -> None:
        """Raise InvalidArgumentError unless the file has ``num_bytes`` of the tensor."""
        if self.tensors[name].offset + num_bytes > len(self._data):
            raise self._torn(f"'{name}' ends at byte {self.tensors[name].offset + num_bytes}")

    def _parsed(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        magic = self._take(4)
        (version,) = self._unpack("<I")
        if magic != _MAGIC or version not in _VERSIONS:
            allowed = " or ".join(map(str, _VERSIONS))
            raise InvalidArgumentError(
                f"{self.name} must be a GGUF file of version {allowed}, got {magic!r} of version {version}; convert "
                f"the model again"
            )
        num_tensors, num_values = self._unpack("<QQ")
        metadata = {}
        for _ in range(num_values):
            key = self._text()
            (type_id,) = self._unpack("<I")
            metadata[key] = self._value(type_id)
        found = {}
        for _ in range(num_tensors):
            name = self._text()
            (num_dims,) = self._unpack("<I")
            if num_dims > _MAX_DIMS:
                raise self._torn(f"'{name}' has {num_dims} dimensions")
            dims = self._unpack(f"<{num_dims}Q")
            type_id, offset = self._unpack("<IQ")
            if prod(dims) > len(self._data) * 8:
                raise self._torn(f"'{name}' has {prod(dims)} elements")
            found[name] = GgufTensor(tuple(reversed(dims)), type_id, offset)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._torn(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()}
        return metadata, tensors

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._text()
        if type_id in _NUMBERS:
            return self._unpack("<" + _NUMBERS[type_id])[0]
        if type_id != _ARRAY:
            raise self._torn(f"a value has type {type_id}")
        item, count = self._unpack("<IQ")
        if item == _STRING:
            return [self._text() for _ in range(count)]
        if item not in _NUMBERS:
            raise self._torn(f"an array has items of type {item}")
        dtype = np.dtype(_NUMBERS[item]).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise self._torn(f"{num_bytes} bytes are announced at byte {self._at}")
        taken = bytes(self._data[self._at : end])
        self._at = end
        return taken

    def _torn(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.name} ({len(self._data)} bytes) is torn or no GGUF file: {what}; fetch it again"
        )


_NUM_EXPERTS = "expert_count"
_EMBEDDING, _LM_HEAD = "token_embd.weight", "output.weight"
#: Factors of the wavelengths of Llama 3, one for each pair of a head; not a weight.
ROPE_FACTORS = "rope_freqs.weight"
#: Parameters of the only such factors that converters write, but for the largest.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufLayout(NamedTuple):
    """How GGUF files of an architecture differ from Hugging Face folders.

    Attributes:
        architecture: Their ``general.architecture``; "": not supported.
        names: Modules of a layer whose names in files are unusual.
        has_pairs: Outputs of queries and keys are interleaved in pairs, not in halves of a head.
        norm_offset: Offset that was added to the weights of norms.
        has_window: ``attention.sliding_window`` is read; else it must be absent or 0.
        numbers: Fields of ``config.json`` that are numbers, with their names after the architecture's.
        counts: Likewise those that are whole numbers. Of two layouts of one architecture files with experts have that
            which counts them.
        derived: Computes fields of ``config.json`` that files lack from those that they have.
    """

    architecture: str = ""
    names: Mapping[str, str] = MappingProxyType({})
    has_pairs: bool = False
    norm_offset: float = 0.0
    has_window: bool = False
    numbers: Mapping[str, str] = MappingProxyType({})
    counts: Mapping[str, str] = MappingProxyType({})
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


def config_of_gguf(path: Path, classes: Sequence[tuple[GgufLayout, str]]) -> dict[str, Any]:
    """The ``config.json`` of the model of a GGUF file, given layouts, each with its class in transformers.

    Raises:
        InvalidArgumentError: The file is truncated, the architecture is not supported, or metadata is missing or wrong.
    """
    with GgufFile.open(path) as file:
        architecture = file.metadata.get("general.architecture")
        has_experts = bool(file.metadata.get(f"{architecture}.{_NUM_EXPERTS}"))
        found = next(
            (
                each
                for each in classes
                if each[0].architecture == architecture != ""
                and has_experts == (_NUM_EXPERTS in each[0].counts.values())
            ),
            None,
        )
        if found is None:
            allowed = ", ".join(dict.fromkeys(layout.architecture for layout, _ in classes if layout.architecture))
            raise InvalidArgumentError(
                f"{file.name}: general.architecture must be one of {allowed}, got {architecture!r}; take another model"
            )
        layout, name = found
        config = _Metadata(file, layout).config()
        return {"architectures": [name], **config, **layout.derived(config)}


class _Metadata:
    def __init__(self, file: GgufFile, layout: GgufLayout) -> None:
        self._file = file
        self._layout = layout

    def config(self) -> dict[str, Any]:
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length", hidden // heads)
        if self._count("attention.value_length", head_dim) != head_dim:
            raise self._fault("attention.value_length", f"the key length, {head_dim}", "another")
        num_layers = self._count("block_count")
        if num_layers > len(self._file.tensors):
            raise self._fault("block_count", f"at most the number of tensors, {len(self._file.tensors)}", num_layers)
        config: dict[str, Any] = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "num_hidden_layers": num_layers,
            "intermediate_size": self._count("feed_forward_length"),
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._vocabulary(),
            "tie_word_embeddings": _LM_HEAD not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "rope_parameters": self._rope(head_dim),
            "dtype": self._dtype(),
            "bos_token_id": self._token("bos"),
            "eos_token_id": [token for token in (self._token("eos"), self._token("eot")) if token is not None],
        }
        config |= {field: self._number(name) for field, name in self._layout.numbers.items()}
        config |= {field: self._count(name) for field, name in self._layout.counts.items()}
        if self._layout.has_window:
            config["sliding_window"] = self._count("attention.sliding_window")
        elif type(window := self._value("attention.sliding_window")) not in (int, type(None)) or window:
            raise self._fault("attention.sliding_window", "absent or 0", window)
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "partial_rotary_factor": self._count("rope.dimension_count", head_dim) / head_dim,
        }
        kind = self._value("rope.scaling.type")
        if not isinstance(kind, str | None):
            raise self._fault("rope.scaling.type", "a text", kind)
        if kind not in (None, "none"):
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
            original = self._value("rope.scaling.original_context_length")
            return rope if original is None else rope | {"original_max_position_embeddings": original}
        if ROPE_FACTORS in self._file.tensors:
            rope |= self._llama3(rope["rope_theta"], head_dim)
        return rope

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        tensor = self._file.tensors[ROPE_FACTORS]
        count = head_dim // 2
        if tensor.shape != (count,) or PLAIN_TYPES.get(tensor.type_id) != "float32":
            raise InvalidArgumentError(
                f"{self._file.name}: '{ROPE_FACTORS}' must have shape [{count}] and type F32, got {list(tensor.shape)} "
                f"of type {tensor.type_id}; convert the model again"
            )
        self._file.check_size(ROPE_FACTORS, 4 * count)
        factors = self._file.read(tensor, 4 * count).view(np.float32).astype(np.float64)
        largest = float(factors.max())
        low, high, original = _LLAMA3.values()
        wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wave_lengths - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
            raise InvalidArgumentError(
                f"{self._file.name}: '{ROPE_FACTORS}' must have the factors of Llama 3, got others, up to {largest}; "
                f"take the folder that the file was made of"
            )
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}

    def _vocabulary(self) -> int:
        embedding = self._file.tensors.get(_EMBEDDING)
        if embedding is None or not embedding.shape:
            raise InvalidArgumentError(f"{self._file.name}: '{_EMBEDDING}' is missing; fetch the file again")
        return embedding.shape[0]

    def _dtype(self) -> str:
        return PLAIN_TYPES.get(self._file.tensors[_EMBEDDING].type_id, "bfloat16")

    def _token(self, name: str) -> int | None:
        token = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token if type(token) is int else None

    def _value(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._layout.architecture}.{name}")

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._value(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self._fault(name, "a whole number above 0, the same for all layers", value)
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._value(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._fault(name, "a number above 0", value)
        return float(value)

    def _fault(self, name: str, allowed: str, got: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._file.name}: {self._layout.architecture}.{name} must be {allowed}, got {got!r}; "
            f"convert the model again"
        )
