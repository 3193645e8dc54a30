"""Any other causal language model of transformers: its layers, with attention over Weft's paged KV cache.

Imports torch and transformers.
"""

import copy
import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from typing_extensions import override

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.observing.logs import get_logger
from weft.llm import ops
from weft.llm.models.decoder import StepInput
from weft.llm.models.fields import FULL, SLIDING
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.model import TransformerModel
from weft.llm.models.stages import Stage
from weft.llm.parallel.context import ContextShare
from weft_kernels.blocks.layout import KVLayer

_log = get_logger("weft.llm")
_NAME = "weft_paged"
#: Arguments of attention that say how it is called and not what it computes.
_HARMLESS = {
    "attention_mask", "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip
#: Tokens of the text that a model is tried with, and where it is cut.
_TRIAL_LEN, _TRIAL_CUT = 12, 7
#: Largest difference of logits, relative to their size, by the type of computation.
_MAX_ERROR = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class _Active(threading.local):
    """The step that this thread computes, the cache by its parts, the part of each layer, and what layers have done.

    Attributes:
        keys: Addresses of the step's keys, by the part of the cache where they are stored.
        sliding: Layers that have had a window.
    """

    step: StepInput | None = None
    cache: list[KVLayer]
    parts: tuple[int, ...]
    keys: dict[int, int]
    sliding: set[int]


_active = _Active()
_loading = threading.Lock()  # transformers sets torch's default type while it makes a model


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: ``query`` ``[1, heads, T, width]``, ``key`` and ``value`` the same."""
    step = _active.step
    unknown = [name for name, given in options.items() if name not in _HARMLESS and given is not None]
    part = _active.parts[module.layer_idx]
    kv_layer = _active.cache[part]
    if unknown or attention_mask is not None or options.get("is_causal") is False:
        raise UnsupportedError(f"its attention has {', '.join(unknown) or 'masks of its own'}")
    if sliding_window:
        _active.sliding.add(module.layer_idx)
    num_heads, head_dim = kv_layer.kv.shape[-2:]
    widths = [heads.shape[3] for heads in (query, key, value)]
    if step is None or key.shape[:3] != (1, num_heads, len(step.positions)) or max(widths) > head_dim:
        raise UnsupportedError("its keys and values differ in number or width from what its configuration says")
    q, k, v = (_padded(heads[0].transpose(0, 1), head_dim) for heads in (query, key, value))
    cache, (cos, sin) = step.caches[0], step.ropes[0]  # which turn nothing
    if part not in _active.keys:
        _active.keys[part] = key.data_ptr()
        ops.rope_and_store(q, k, v, cos, sin, step.positions, step.slot_mapping, kv_layer, step_cache=cache)
    elif _active.keys[part] != key.data_ptr():
        raise UnsupportedError("its layers share keys and values in another way than its configuration says")
    out = ops.paged_attention(
        q,
        kv_layer,
        step.block_tables,
        step.q_start,
        step.ctx_len,
        scale=widths[0] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        max_q_len=step.max_q_len,
        max_ctx_len=step.max_ctx_len,
        step_cache=cache,
    )
    return out[None, ..., : widths[2]], None


def _padded(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Heads of the cache's width, contiguous; zeros behind narrower ones change neither scores nor values."""
    missing = width - heads.shape[2]
    return (torch.nn.functional.pad(heads, (0, missing)) if missing else heads).contiguous()


class _Hidden:
    """Hidden states as the layers of any model return them: what they might return besides is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(torch.nn.Module):  # type: ignore[misc]  # transformers leaves it untyped
    """Stands for a model's layers where only its head is wanted: the hidden states are those that are given."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **options: Any) -> _Hidden:
        del args, options
        return _Hidden(inputs_embeds)


class ForeignModel(TransformerModel):
    """A model of transformers with the interface of ``TransformerModel``.

    Slower than a model with a module in Weft: its products and norms are torch's, step by step.

    Args:
        folder: Of a checkpoint; None: random weights.
        seed: Of random weights.

    Raises:
        UnsupportedError: The model keeps more, or something else, than keys and values of each token; or transformers
            cannot exchange its attention.
        InvalidArgumentError: ``max_model_len`` exceeds the context length of the model, or files do not fit it.
    """

    def __init__(
        self,
        config: ForeignConfig,
        folder: Path | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_model_len: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= max_model_len <= config.max_context_len:
            raise InvalidArgumentError(f"max_model_len must be from 0 to {config.max_context_len}, got {max_model_len}")
        transformers.AttentionInterface.register(_NAME, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *args, **options: None)
        self.config: ForeignConfig = config
        self._own_config = config
        self.dtype, self.device = dtype, torch.device(device)
        self._split = self.lora = None
        self.stage = Stage(range(config.num_kv_layers))
        ones = torch.ones((1, config.head_dim // 2), dtype=torch.float32, device=self.device)
        self._no_rotation = ones, torch.zeros_like(ones)  # keys come rotated; of one position, 0
        self._model = _load(config, folder, dtype, seed).to(self.device).eval().requires_grad_(False)
        self.matrix_bytes = sum(each.numel() * each.itemsize for each in self._model.parameters() if each.dim() == 2)
        self._head = copy.copy(self._model)
        self._head._modules = {**self._model._modules, self._model.base_model_prefix: _Given()}
        with torch.inference_mode():
            self._try()
        _log.info("%s runs through transformers: slower than a model that has a module in Weft", config.name)

    @override
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        q_start: torch.Tensor,
        ctx_len: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_q_len: int,
        max_ctx_len: int,
        adapters: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        incoming: torch.Tensor | None = None,
        share: ContextShare | None = None,
    ) -> torch.Tensor:
        del features, adapters, incoming, share  # no draft head and no adapter runs through transformers
        still = torch.zeros_like(positions)
        _active.step = StepInput(
            still, slot_mapping, block_tables, q_start, ctx_len, max_q_len, max_ctx_len, [self._no_rotation]
        )
        _active.cache, _active.parts = self._layers_of(kv), self.config.kv_layers
        _active.keys, _active.sliding = {}, set()
        try:
            with torch.inference_mode():
                found = self._model.base_model(
                    input_ids=token_ids[None].long(), position_ids=positions[None].long(), use_cache=False
                )
        finally:
            _active.step, _active.cache = None, []  # a thread that loads models outlives their caches
        hidden: torch.Tensor = found.last_hidden_state[0]
        return hidden

    @override
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._model.get_input_embeddings()(token_ids.long())
        return rows

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
            return found.float()

    def _try(self) -> None:
        """Compare the logits of a text in two steps with transformers' own of the whole text.

        A model whose layers remember more than keys and values, or bypass the cache, differs.

        Raises:
            UnsupportedError: They differ, or the model cannot be run.
        """
        tokens = torch.arange(1, 1 + _TRIAL_LEN, dtype=torch.int32, device=self.device) % self.config.vocab_size
        positions = torch.arange(_TRIAL_LEN, dtype=torch.int32, device=self.device)
        kv = self.new_kv(2, 16)
        try:
            steps = []
            for first, end in ((0, _TRIAL_CUT), (_TRIAL_CUT, _TRIAL_LEN)):
                bounds = torch.tensor([0, end - first, end], dtype=torch.int32, device=self.device)
                own = positions[first:end]
                hidden = self.forward(
                    tokens[first:end], own, kv, torch.ones_like(bounds[:1, None]), bounds[:2], bounds[2:],
                    own.long() + 16, end - first, end,
                )  # fmt: skip
                steps.append(self.logits(hidden))
            self._check_windows(_active.sliding)
            self._model.set_attn_implementation("eager")
            expected = self._model(input_ids=tokens[None].long(), use_cache=False).logits[0].float()
            self._model.set_attn_implementation(_NAME)
        except UnsupportedError as error:
            raise self._unsupported(error.message) from error
        except Exception as error:  # whatever a model that is called in an unusual way raises
            raise self._unsupported(f"{type(error).__name__}: {str(error)[:200]}") from error
        finally:
            self.forget_cache()
        error_of = (torch.cat(steps) - expected).abs().max() / expected.abs().max()
        if not error_of <= _MAX_ERROR[self.dtype]:  # also where it is not a number
            raise self._unsupported(f"its logits differ by {error_of:.2g} of their size with a paged cache")

    def _check_windows(self, sliding: set[int]) -> None:
        """A window that is in a mask alone would not show in a short text."""
        text = self._model.config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or []
        if others := sorted(set(map(str, kinds)) - {SLIDING, FULL}):
            raise UnsupportedError(f"it has layers of type {', '.join(others)}")
        is_sliding = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
        if len(sliding) != kinds.count(SLIDING) if kinds else is_sliding and not sliding:
            raise UnsupportedError("its attention is not told its window")

    def _unsupported(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"architecture '{self.config.name}' cannot run through transformers over a paged KV cache: {reason}; take "
            f"a model of another architecture"
        )


def _load(config: ForeignConfig, folder: Path | None, dtype: torch.dtype, seed: int) -> Any:
    kind = getattr(transformers, config.name)
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"architecture '{config.name}' cannot run through transformers over a paged KV cache: its attention cannot "
            f"be exchanged; take a model of another architecture"
        )
    try:
        if folder is not None:
            with _loading:
                model, found = kind.from_pretrained(
                    folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True, output_loading_info=True
                )
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"{len(missing)} weights are missing, first {missing[0]!r}")
            return model
        torch.manual_seed(seed)
        settings = transformers.CONFIG_MAPPING[config.fields["model_type"]].from_dict(dict(config.fields))
        return kind._from_config(settings, dtype=dtype, attn_implementation=_NAME)
    except Exception as error:  # whatever its loaders raise
        raise InvalidArgumentError(
            f"{folder or config.name}: transformers cannot load it: {str(error)[:300]}"
        ) from error
