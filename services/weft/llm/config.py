"""Engine settings, validated on construction: ``EngineConfig``."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import suggestion
from weft.llm.models.fields import DTYPE_BYTES
from weft.llm.models.model_config import KV_CODES, TransformerConfig
from weft.llm.models.stages import stages
from weft.llm.parallel.topology import ParallelSizes

__all__ = ["EngineConfig", "TransformerConfig"]

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
_QUANTIZATIONS = {"none": 0, "int8": 8, "int4": 4}
_CHOICES: dict[str, Collection[str]] = {
    "dtype": ("auto", *DTYPE_BYTES),
    "kv_cache_dtype": ("auto", *KV_CODES),
    "quantization": _QUANTIZATIONS,
    "speculation": ("none", "ngram", "draft", "eagle3", "mtp"),
    "async_scheduling": ("auto", "true", "false"),
}
_WITH_FOLDER = {"draft": "draft model", "eagle3": "EAGLE-3 head"}
#: Proposers whose input is the target's hidden states.
HEADS = ("eagle3", "mtp")
#: Proposers of earlier versions, and what to take in their place.
_REPLACED = {"medusa": "eagle3 with an EAGLE-3 head, or ngram", "lookahead": "ngram"}
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_DEFAULT_STEP_TOKENS = {"cpu": 128, "cuda": 2048}
#: The last block of a sequence is half empty on average: on a CPU, sequences of 80 tokens leave 3.8 % of slots empty
#: with blocks of 8, and 7.7 % with 16 (``benchmarks.language_model``, C1). With 8, decode attention takes 5 to 20 %
#: longer, and a step of the scheduler 0.2 us longer for each sequence.
_DEFAULT_BLOCK_SIZE = {"cpu": 8, "cuda": 16}
_CPU_CACHE_BYTES = 256 * 2**20
#: Share of free GPU memory for the KV cache; the rest is for the activations of a step.
_GPU_CACHE_SHARE = 0.9

#: Smallest and largest value of every number.
_BOUNDS: dict[str, tuple[float, float]] = {
    "num_blocks": (0, _INT32_MAX),
    "kv_cache_bytes": (0, _INT64_MAX),
    "kv_offload_bytes": (0, _INT64_MAX),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (0, 2**20),
    "max_model_len": (0, 2**24),
    "long_prefill_token_threshold": (0, 2**20),
    "max_long_prefills": (1, 65536),
    "watermark": (0.0, 0.5),
    "max_queued": (0, _INT32_MAX),
    "aging_ns": (0, _INT64_MAX),
    "num_threads": (1, 1024),
    "num_speculative_tokens": (1, 16),
    "seed": (-1, _INT64_MAX),
    "grammar_timeout_s": (0.01, 3600.0),
    "max_loras": (0, 4096),
    "max_lora_rank": (1, 4096),
    "slo_ttft_ms": (0.0, 1e9),
    "slo_tpot_ms": (0.0, 1e9),
    "peak_flops_per_s": (0.0, 1e18),
    "peak_bytes_per_s": (0.0, 1e18),
    "tensor_parallel_size": (1, 256),
    "pipeline_parallel_size": (1, 256),
    "context_parallel_size": (1, 256),
    "num_remote_ranks": (0, 1024),
    "rank_timeout_s": (0.1, 86400.0),
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. A default of 0 stands for a value computed here or in ``resolved``.

    docs/language-models.md, "Parameters of the engine", has meaning, unit and default of each field; besides:

    Attributes:
        aging_ns: Waiting time that counts as one priority level, in nanoseconds. 0: levels are strict.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        InvalidArgumentError: A field is out of its range; the message has its name, the value and the range.
    """

    block_size: int = 0
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    kv_offload_bytes: int = 0
    kv_offload_path: str = ""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    enable_prefix_caching: bool = True
    deterministic: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    long_prefill_token_threshold: int = 0
    max_long_prefills: int = 2
    watermark: float = 0.03
    max_queued: int = 0
    aging_ns: int = 0
    num_threads: int = 1
    seed: int = -1
    enable_cuda_graphs: bool = True
    speculation: str = "none"
    num_speculative_tokens: int = 4
    async_scheduling: str = "auto"
    draft_model: str = ""
    grammar_timeout_s: float = 10.0
    lora_adapters: str = ""
    lora_root: str = ""
    max_loras: int = 0
    max_lora_rank: int = 16
    device: str = "cpu"
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    peak_flops_per_s: float = 0.0
    peak_bytes_per_s: float = 0.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    num_remote_ranks: int = 0
    rank_listen_address: str = ""
    rank_key_file: str = ""
    rank_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, type(field.default))
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise self._fault(name, f"must be from {least} to {most}")
        if self.block_size not in (0, *_BLOCK_SIZES):
            raise self._fault("block_size", f"must be 0 or one of {', '.join(map(str, _BLOCK_SIZES))}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                cure = f"; in its place take {_REPLACED[value]}" if (value := getattr(self, name)) in _REPLACED else ""
                raise self._fault(name, f"must be one of {', '.join(choices)}", cure)
        if self.async_scheduling == "true" and (self.speculation != "none" or self.kv_offload_bytes):
            reason = "with speculation or kv_offload_bytes, whose plans depend on the step before"
            raise self._fault("async_scheduling", f"must be auto or false {reason}")
        if self.pipeline_parallel_size > 1 and self.speculation not in ("none", "ngram"):
            reason = (
                f"with pipeline_parallel_size = {self.pipeline_parallel_size}: one stage alone would know its drafts"
            )
            raise self._fault("speculation", f"must be none or ngram {reason}")
        if (self.speculation in _WITH_FOLDER) != bool(self.draft_model):
            needed = f"the folder of the {_WITH_FOLDER[self.speculation]}," if not self.draft_model else "empty"
            raise self._fault("draft_model", f"must be {needed} with speculation = {self.speculation}")
        if len(self.adapters) > self.max_loras > 0:
            raise self._fault("max_loras", f"must be at least the {len(self.adapters)} adapters of lora_adapters")
        if not _DEVICE.fullmatch(self.device):
            raise self._fault("device", "must be cpu, cuda or cuda:N")
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise self._fault("kv_cache_dtype", "must be auto or int8 on a CPU; int8 takes as little memory")
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise self._fault("kv_offload_bytes", "must be 0 without enable_prefix_caching, which names its blocks")
        if self.kv_offload_bytes and self.speculation in HEADS:
            raise self._fault(
                "kv_offload_bytes", f"must be 0 with {self.speculation}, which needs more than the tier keeps"
            )
        if self.kv_offload_path and not (self.kv_offload_bytes and self.device == "cpu"):
            raise self._fault("kv_offload_path", "must be empty unless kv_offload_bytes is set, on a CPU")
        if self.max_model_len == 1:
            raise self._fault("max_model_len", "must be 0 or at least 2, a prompt's token and a new one")
        if self.num_blocks == 1:
            raise self._fault("num_blocks", "must be 0 or at least 2: block 0 holds no tokens")
        if self.num_remote_ranks >= (num_ranks := self.parallel_sizes.num_ranks):
            raise self._fault("num_remote_ranks", f"must be less than the {num_ranks} ranks: the first is here")
        for name in ("rank_listen_address", "rank_key_file"):
            if bool(getattr(self, name)) != bool(self.num_remote_ranks):
                raise self._fault(name, "must be set with num_remote_ranks, and only then")
        if not self.block_size:
            object.__setattr__(self, "block_size", _DEFAULT_BLOCK_SIZE[self.device.partition(":")[0]])
        if not self.max_num_batched_tokens:
            default = _DEFAULT_STEP_TOKENS[self.device.partition(":")[0]]
            object.__setattr__(
                self, "max_num_batched_tokens", max(default * self.context_parallel_size, 2 * self.max_num_seqs)
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise self._fault(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs = {self.max_num_seqs}, so that each sequence gets a token in every "
                f"step; raise it, or lower max_num_seqs",
            )
        if self.speculation != "none" and self.max_num_batched_tokens == 1:
            raise self._fault("max_num_batched_tokens", "must be at least 2 with speculation, a token and a draft")
        if not self.long_prefill_token_threshold:
            object.__setattr__(self, "long_prefill_token_threshold", self.max_num_batched_tokens)

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the adapters that are loaded with the model, by name. Raises InvalidArgumentError."""
        pairs = [each.strip().partition("=") for each in self.lora_adapters.split(",") if each.strip()]
        found = {name: folder for name, _, folder in pairs}
        if len(found) < len(pairs) or not all(is_adapter_name(name) and folder for name, folder in found.items()):
            raise self._fault("lora_adapters", "must be NAME=FOLDER,NAME=FOLDER and so on, each name once")
        return found

    @property
    def num_lora_slots(self) -> int:
        """Adapters that may be loaded at once."""
        return self.max_loras or len(self.adapters)

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """How many ways each axis divides the model."""
        return ParallelSizes(self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size)

    @property
    def num_bits(self) -> int:
        """Bits to which unquantised weights are rounded; 0: none."""
        return _QUANTIZATIONS[self.quantization]

    @property
    def kv_dtype(self) -> str:
        """Type of the KV cache: a key of ``DTYPE_BYTES`` or one of ``KV_CODES``; ``auto`` before ``resolved``."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is planned before the tokens of the previous one are known."""
        if self.async_scheduling == "auto":
            return (self.device != "cpu" or self.pipeline_parallel_size > 1) and self.speculation == "none"
        return self.async_scheduling == "true"

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Parse the ``parameters`` of a ``config.pbtxt``; absent fields keep their default.

        Raises:
            InvalidArgumentError: A name is unknown, or a value does not have its field's type or range.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in parameters.items():
            if name not in defaults:
                raise InvalidArgumentError(f"engine: unknown parameter '{name}'{suggestion(name, defaults)}")
            values[name] = _parsed(name, text, type(defaults[name]))
        return cls(**values)

    def resolved(self, model: TransformerConfig, draft: TransformerConfig | None = None) -> Self:
        """A copy with every default that depends on the model filled in, validated against the model.

        ``num_blocks`` is 0 if it depends on free GPU memory: see ``with_cache``. Keys and values of a ``draft`` model
        take part of the cache.

        Raises:
            InvalidArgumentError: ``max_model_len`` or ``async_scheduling`` does not fit the model; or no block fits.
        """
        longest = model.max_context_len
        if self.max_model_len > longest:
            raise self._fault("max_model_len", f"must be at most {longest}, the context of the model; lower it, or 0")
        if self.async_scheduling == "true" and all(model.windows):
            raise self._fault("async_scheduling", "must be auto or false for a model whose layers all have a window")
        dtype = model.dtype if self.dtype == "auto" else self.dtype
        resolved = replace(self, dtype=dtype, max_model_len=self.max_model_len or longest)
        num_bytes = self.kv_cache_bytes or (_CPU_CACHE_BYTES if self.device == "cpu" else 0)
        return resolved if self.num_blocks or not num_bytes else resolved._sized(model, draft, num_bytes)

    def with_cache(
        self, model: TransformerConfig, free_bytes: Callable[[], int], draft: TransformerConfig | None = None
    ) -> Self:
        """A copy of this resolved configuration with ``num_blocks`` set, by ``free_bytes()`` if it depends on it.

        Raises:
            InvalidArgumentError: The free memory holds no block.
        """
        return self if self.num_blocks else self._sized(model, draft, int(free_bytes() * _GPU_CACHE_SHARE))

    def _sized(self, model: TransformerConfig, draft: TransformerConfig | None, num_bytes: int) -> Self:
        token_bytes = model.of_rank(self.tensor_parallel_size).kv_bytes_per_token(self.kv_dtype)
        if self.pipeline_parallel_size > 1:
            most = max(len(stage.layers) for stage in stages(model, self.pipeline_parallel_size))
            token_bytes = token_bytes * most // model.num_layers
        if draft is not None:
            token_bytes += draft.kv_bytes_per_token(self.dtype)
        block_bytes = self.block_size * token_bytes
        num_blocks = min(num_bytes // block_bytes, _INT32_MAX)
        if num_blocks < 2:
            what = "this model" if draft is None else "this model with its draft model"
            raise InvalidArgumentError(
                f"engine: kv_cache_bytes must be at least {2 * block_bytes}, two blocks of {what}, got {num_bytes}"
                "; raise it, free memory of the device, or lower block_size"
            )
        return replace(self, num_blocks=num_blocks)

    def _check_type(self, name: str, wanted: type) -> None:
        value = getattr(self, name)
        if wanted is float and type(value) is int:
            object.__setattr__(self, name, float(value))
        elif type(value) is not wanted or (isinstance(value, float) and not math.isfinite(value)):
            raise self._fault(name, f"must be {_A[wanted]}")

    def _fault(self, name: str, problem: str, cure: str = "") -> InvalidArgumentError:
        return InvalidArgumentError(f"engine: {name} {problem}, got {getattr(self, name)!r}{cure}")


_A: dict[type, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


def _parsed(name: str, text: str, wanted: type) -> Any:
    try:
        return _TRUTHS[text.strip().lower()] if wanted is bool else wanted(text.strip())
    except (ValueError, KeyError) as error:
        raise InvalidArgumentError(f"engine: {name} must be {_A[wanted]}, got '{text}'") from error


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have the name: printable, at most 128 characters, none of them ``:``, ``=`` and ``,``."""
    return 0 < len(name) <= 128 and name.isprintable() and not set(name) & set(":=, ")


class KvWindow(NamedTuple):
    """Which blocks of a sequence are behind its attention window, and how many it needs at most.

    A token at position p reads the keys of positions ``p - num_tokens + 1`` to p. One more is kept, because a fork
    computes the last tokens of its parent's prompt again.

    Attributes:
        num_tokens: The widest window of all layers; 0: some layer reads all tokens, so that no block is ever behind.
        block_size: Tokens of a block.
        num_step_tokens: Most tokens that one step computes for a sequence.
    """

    num_tokens: int = 0
    block_size: int = 1
    num_step_tokens: int = 1

    def num_behind(self, num_computed_tokens: int) -> int:
        """Number of leading blocks that tokens from position ``num_computed_tokens`` on do not read."""
        return max(num_computed_tokens - self.num_tokens, 0) // self.block_size if self.num_tokens else 0

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of up to ``num_tokens`` tokens owns at once."""
        whole = -(-num_tokens // self.block_size)
        if not self.num_tokens:
            return whole
        # The window with the token that is kept and a step lie anywhere on the grid of blocks.
        return min(whole, -(-(self.num_tokens + self.num_step_tokens) // self.block_size) + 1)

    def table_len(self, num_tokens: int, num_behind: int) -> int:
        """Entries in the table of a sequence of ``num_tokens`` tokens of which ``num_behind`` blocks are behind."""
        return min(-(-num_tokens // self.block_size), num_behind + self.num_blocks(num_tokens))

    def max_len(self, max_model_len: int, num_blocks: int) -> int:
        """Longest sequence, prompt and output, in tokens, that ``num_blocks`` blocks can hold."""
        return max_model_len if self.num_blocks(max_model_len) <= num_blocks else num_blocks * self.block_size


def kv_window(config: EngineConfig, model: TransformerConfig) -> KvWindow:
    """The window of an engine's sequences: the widest of the model's layers; none if a layer has no window."""
    windows = model.windows
    return KvWindow(max(windows) if all(windows) else 0, config.block_size, config.max_num_batched_tokens)
