"""Loads a model, or a rank's part of one, from a Hugging Face folder, and makes its runner; imports torch."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.backends.llm.settings import Settings
from weft.backends.tokenizers import find_tokenizer, load_tokenizer
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.processes.malloc import give_back_freed_memory
from weft.llm.config import HEADS, EngineConfig, TransformerConfig, kv_window
from weft.llm.device_state import DeviceProposer
from weft.llm.graphs import CudaRecorder, GraphPolicy, build_shrinking
from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.heads import HeadConfig
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.sharding import check_sizes
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.parallel.groups import ALONE, Groups
from weft.llm.runner import ModelRunner
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer, load_head
from weft.llm.weights.checkpoint import Checkpoint
from weft.llm.weights.parts import LM_HEAD, read_object
from weft_kernels.linear.products import faster_dtype

_log = logging.getLogger("weft.model.llm")

_TRIAL_BLOCKS = 2


def make_runner(
    make: Callable[[int], ModelRunner],
    config: EngineConfig,
    model_config: TransformerConfig,
    draft_config: TransformerConfig | None = None,
) -> ModelRunner:
    """Create a runner with a cache of the configured size, and with CUDA graphs if the device supports them.

    Args:
        make: Creates a runner whose cache has the given number of blocks.
        config: Resolved; without a number of blocks if that depends on free memory.

    Raises:
        InvalidArgumentError: The free memory of the device holds no block, or not the requested cache.
    """
    if config.device == "cpu":
        return make(config.num_blocks)
    device = torch.device(config.device)
    if not config.enable_cuda_graphs:
        return make(config.with_cache(model_config, lambda: _free_bytes(device), draft_config).num_blocks)
    policy = graph_policy(config)

    def build(num_blocks: int, *, only_largest: bool = False) -> ModelRunner:
        runner = make(num_blocks)
        runner.bind_thread()
        try:
            runner.capture(policy, CudaRecorder(device).record, only_largest=only_largest)
        except BaseException:
            runner.close()
            raise
        return runner

    def free_beside_graphs() -> int:
        """Free memory, less what the largest graph takes; the others fit into its memory."""
        _release()
        free_bytes = _free_bytes(device)
        trial = build(_TRIAL_BLOCKS, only_largest=True)
        taken_bytes = free_bytes - _free_bytes(device)
        trial.close()
        del trial
        _release()
        return _free_bytes(device) - taken_bytes

    num_blocks = config.with_cache(model_config, free_beside_graphs, draft_config).num_blocks
    return build_shrinking(num_blocks, build, out_of_memory=torch.OutOfMemoryError, release=_release)


def graph_policy(config: EngineConfig) -> GraphPolicy:
    """Shapes of steps to capture as CUDA graphs: one token of each sequence, and with speculation all drafts too."""
    q_lens = (1,) if config.speculation == "none" else (1, 1 + config.num_speculative_tokens)
    return GraphPolicy(config.max_num_seqs, q_lens)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def read_draft_config(
    directory: Path, config: EngineConfig, model: TransformerConfig, *, has_weights: bool
) -> TransformerConfig | None:
    """Read the configuration of the draft model or head that ``config`` names; None if it names none.

    Raises:
        NotFoundError: The folder has no ``config.json``.
        InvalidArgumentError: It is not supported, or does not fit the target: another vocabulary, a shorter context.
    """
    folder = directory / config.draft_model
    if config.speculation in HEADS:
        draft: TransformerConfig = _read_head_config(folder, config, model, has_weights=has_weights)
    elif config.speculation == "draft":
        draft = read_config(folder)
    else:
        return None
    if draft.vocab_size != model.vocab_size:
        raise InvalidArgumentError(
            f"draft_model must have the model's vocabulary of {model.vocab_size} tokens, got {draft.vocab_size} in "
            f"{folder}; take a smaller model of the same family"
        )
    if differing := _differing_token(directory, folder):
        raise InvalidArgumentError(
            f"draft_model must have the model's tokenizer; that in {folder} has another id for {differing}; take a "
            f"smaller model of the same family"
        )
    longest = config.max_model_len or model.max_context_len
    if draft.max_context_len < longest:
        raise InvalidArgumentError(
            f"draft_model must have a context of {longest} tokens at least, got {draft.max_context_len} in {folder}; "
            f"set max_model_len to {draft.max_context_len}, or take another one"
        )
    window = kv_window(config, model).num_tokens
    if window and not 0 < min(draft.windows) <= max(draft.windows) <= window:
        raise InvalidArgumentError(
            f"draft_model must have a sliding window of at most {window} tokens in every layer, as the model has, got "
            f"{sorted(set(draft.windows))} in {folder}, 0 for none; take another one"
        )
    return draft


def _read_head_config(folder: Path, config: EngineConfig, model: TransformerConfig, *, has_weights: bool) -> HeadConfig:
    is_mtp = config.speculation == "mtp"
    if isinstance(model, ForeignConfig) or (is_mtp and model.mtp_head is None):
        why = "runs through transformers" if isinstance(model, ForeignConfig) else "has no such layer that Weft runs"
        raise InvalidArgumentError(
            f"engine: speculation must not be {config.speculation} for {model.name}, which {why}, got "
            f"'{config.speculation}'; take ngram or draft"
        )
    if is_mtp:
        head: HeadConfig = model.mtp_head.of(model)
        return head
    described = read_object(folder / "config.json")
    if described is None:
        raise NotFoundError(f"no config.json in {folder}; give the folder of an EAGLE-3 head")
    if not has_weights:
        return eagle3_config(described, [LM_HEAD], model)
    with Checkpoint.open(folder) as checkpoint:
        return eagle3_config(described, checkpoint.names, model)


def load_proposer(
    directory: Path,
    config: EngineConfig,
    model: TransformerModel,
    draft_config: TransformerConfig | None,
    *,
    has_weights: bool,
) -> DeviceProposer | None:
    """Load the device proposer (draft model or head) of ``draft_config``, if any.

    ``has_weights`` False: its weights are random.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, or a head is of another model.
    """
    if draft_config is None:
        return None
    folder = directory / config.draft_model
    if isinstance(draft_config, HeadConfig):
        options = {"seed": max(config.seed, 0), "max_model_len": config.max_model_len, "num_bits": config.num_bits}
        head = load_head(folder, draft_config, model, has_weights=has_weights, **options)
        return HeadProposer(head, config.max_num_batched_tokens)
    draft = _load_model(folder, draft_config, config, has_weights=has_weights, deterministic=False)
    return DraftModelProposer(draft, config.max_num_batched_tokens)


def _differing_token(directory: Path, folder: Path) -> str:
    """A token that has different ids in the two tokenizers; "": none, or one of the folders has no tokenizer."""
    files = [file for file in map(find_tokenizer, (directory, folder)) if file is not None]
    if len(files) < 2:
        return ""
    ours, theirs = (load_tokenizer(file, "torch").get_vocab() for file in files)
    return next((repr(token) for token, number in sorted(ours.items()) if theirs.get(token) != number), "")


def _load_model(
    folder: Path,
    model: TransformerConfig,
    config: EngineConfig,
    *,
    has_weights: bool,
    deterministic: bool,
    num_loras: int = 0,
    groups: Groups = ALONE,
) -> TransformerModel:
    dtype = getattr(torch, config.dtype)
    if isinstance(model, ForeignConfig):
        return _load_foreign(folder if has_weights else None, model, config)
    lora = LoraBank(model, num_loras, config.max_lora_rank, dtype, config.device) if num_loras else None
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": config.device,
        "groups": groups,
        "by_outputs": deterministic or config.num_bits > 0,
    }
    if has_weights:
        weights = load_folder(folder, model, **options)
    else:
        weights = dict(random_weights(model, max(config.seed, 0), **options))
    return TransformerModel(
        model,
        weights,
        dtype=dtype,
        device=config.device,
        deterministic=deterministic,
        max_model_len=config.max_model_len,
        num_bits=config.num_bits,
        lora=lora,
        groups=groups,
    )


def _load_foreign(folder: Path | None, model: ForeignConfig, config: EngineConfig) -> TransformerModel:
    for name, is_set in (
        ("deterministic", config.deterministic),
        ("quantization", config.num_bits),
        ("max_loras", config.num_lora_slots),
    ):
        if is_set:
            raise InvalidArgumentError(
                f"{name} must not be set for {model.name}, which runs through transformers; remove it, or take a model "
                f"that has a module in Weft"
            )
    # It imports transformers, which only such models need.
    from weft.llm.models.foreign_model import ForeignModel  # noqa: PLC0415

    return ForeignModel(
        model,
        folder,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        max_model_len=config.max_model_len,
        seed=max(config.seed, 0),
    )


def _with_dtype(config: EngineConfig, model: TransformerConfig) -> EngineConfig:
    if config.dtype != "auto" or config.device != "cpu" or model.dtype == "float32":
        return config
    fastest = faster_dtype(getattr(torch, model.dtype), (model.intermediate_size, model.hidden_size))
    name = str(fastest).removeprefix("torch.")
    if name != model.dtype:
        _log.info("computes in float32, which is faster than %s on this CPU; set 'dtype' to decide", model.dtype)
    return replace(config, dtype=name)


def resolve(
    directory: Path, settings: Settings, model: TransformerConfig
) -> tuple[EngineConfig, TransformerConfig | None]:
    """The settings of the engine for the model in the folder, and the configuration of its draft model or head.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A setting does not fit the model.
    """
    config = _with_dtype(settings.engine, model)
    if isinstance(model, ForeignConfig):
        config = replace(config, enable_cuda_graphs=False)  # its steps allocate, and wait for the device
    check_sizes(model, config.parallel_sizes)
    draft = read_draft_config(directory, config, model, has_weights=settings.has_weights)
    return config.resolved(model, draft), draft


def load_part(
    directory: Path,
    settings: Settings,
    model_config: TransformerConfig,
    config: EngineConfig,
    draft_config: TransformerConfig | None,
    groups: Groups = ALONE,
) -> tuple[TransformerModel, ModelRunner]:
    """Load what the rank that is in ``groups`` has of the model in the folder, by ``resolve``; the runner is warm.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, or the architecture is not supported.
    """
    model = _load_model(
        directory,
        model_config,
        config,
        has_weights=settings.has_weights,
        deterministic=config.deterministic,
        num_loras=config.num_lora_slots,
        groups=groups,
    )
    give_back_freed_memory()  # what was packed leaves holes as large as the weights
    proposer = load_proposer(directory, config, model, draft_config, has_weights=settings.has_weights)
    runner = make_runner(partial(ModelRunner, model, config, proposer=proposer), config, model_config, draft_config)
    runner.warm_up()
    return model, runner
