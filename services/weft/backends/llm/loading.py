"""Loads an engine from a Hugging Face folder; imports torch."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from weft.backends.llm.settings import Settings
from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import find_tokenizer, load_tokenizer
from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.processes.malloc import give_back_freed_memory
from weft.llm.block_fields import block_fields, weights_digest
from weft.llm.config import HEADS, EngineConfig, TransformerConfig, kv_window
from weft.llm.device_state import DeviceProposer
from weft.llm.engine import Engine
from weft.llm.grammar import GrammarCompiler
from weft.llm.graphs import CudaRecorder, GraphPolicy, build_shrinking
from weft.llm.metrics import EngineMetrics
from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.heads import HeadConfig
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.request import NO_SPECULATION, EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.plan import UNKNOWN_TOKEN, ForwardPlan
from weft.llm.scheduler.sequence import Sequence
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer, load_head
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import AdaptiveDepth, CostCurve, DraftBalance, ProposerFactory, Speculator
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


#: Proposers on the host; all others are the runner's.
HOST_PROPOSERS: dict[str, ProposerFactory] = {"ngram": NgramProposer}

#: Rows of a step whose time is measured, as far as the step and the time limit allow.
_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Steps per point, of which the fastest counts: at least, at most, and the time that is enough.
_MIN_RUNS, _MAX_RUNS = 3, 20
_RUNS_S = 0.05
_MAX_S = 1.5


def make_speculator(config: EngineConfig, runner: ModelRunner) -> Speculator | None:
    """Create the speculator that ``config`` asks for, if any.

    First measures the times of steps, for at most a few seconds, with the threads that the engine will use.
    """
    if config.speculation == NO_SPECULATION:
        return None
    runner.bind_thread()
    factory = HOST_PROPOSERS.get(config.speculation)
    num_drafts = 0 if factory else config.num_speculative_tokens
    costs = [
        measured_cost(config, runner, num_drafts=num_drafts, temperature=temperature) for temperature in (0.0, 1.0)
    ]
    depth = AdaptiveDepth(config.num_speculative_tokens, *costs)
    return Speculator(config.speculation, depth, factory, DraftBalance(), clock_of(config))


def clock_of(config: EngineConfig) -> Callable[[], float]:
    """Seconds of the engine's thread, which vary less on a shared machine, if it alone computes; else of the clock."""
    return time.thread_time if config.device == "cpu" and config.num_threads == 1 else time.perf_counter


def measured_cost(config: EngineConfig, runner: ModelRunner, *, num_drafts: int, temperature: float = 0.0) -> CostCurve:
    """Measure the time of steps by number of rows, with short sequences; sampling (``temperature``) costs more per row.

    The runner must not be in use; of its cache only the null block is changed. ``num_drafts``: drafts for timing a
    device proposer; 0: there is none.
    """
    points: list[tuple[int, float]] = []
    end_s = time.perf_counter() + _MAX_S
    for num_rows in _NUM_ROWS:
        if num_rows > config.max_num_batched_tokens or (len(points) > 1 and time.perf_counter() > end_s):
            break
        num_seqs = min(-(-num_rows // (1 + config.num_speculative_tokens)), config.max_num_seqs)
        if num_rows > num_seqs * config.max_model_len:
            break
        points.append((num_rows, _fastest_s(config, runner, _plan(config, num_seqs, num_rows, temperature, None))))
    draft_s = 0.0
    if num_drafts:
        num_drafts = min(num_drafts, config.max_model_len - 1)
        known, unknown = (_plan(config, 1, 1 + num_drafts, temperature, draft) for draft in (None, UNKNOWN_TOKEN))
        added_s = _fastest_s(config, runner, unknown) - _fastest_s(config, runner, known)
        draft_s = max(added_s, 0.0) / num_drafts
    _log.info(
        "milliseconds of a step at temperature %g by rows: %s; of a draft: %.3f",
        temperature,
        ", ".join(f"{num_rows}: {1e3 * seconds:.2f}" for num_rows, seconds in points),
        1e3 * draft_s,
    )
    return CostCurve(points, draft_s)


def _fastest_s(config: EngineConfig, runner: ModelRunner, plan: ForwardPlan) -> float:
    clock_s = clock_of(config)
    times_s: list[float] = []
    while len(times_s) <= _MIN_RUNS or (len(times_s) < _MAX_RUNS and sum(times_s) < _RUNS_S):
        start_s = clock_s()
        runner.run(plan._replace(token_ids=plan.token_ids.copy()))  # a proposer fills in unknown ones
        times_s.append(clock_s() - start_s)
    return min(times_s[1:])  # the first may compile or allocate


def _plan(config: EngineConfig, num_seqs: int, num_rows: int, temperature: float, draft: int | None) -> ForwardPlan:
    """A step of ``num_seqs`` sequences at their beginning that samples at each row, with a cache of the null block.

    Tokens are 0; all but the first of each sequence are drafts ``draft``; None: no drafts.
    """
    seqs = []
    for slot, rows in enumerate(np.array_split(np.arange(num_rows), num_seqs)):
        request = EngineRequest(np.zeros(1, np.int32), SamplingParams(temperature=temperature), sink=lambda delta: None)
        seq = Sequence(request, slot)
        seq.slot, seq.num_scheduled, seq.drafts = slot, len(rows), [draft or 0] * (len(rows) - 1)
        seq.block_table = [NULL_BLOCK] * -(-len(rows) // config.block_size)
        seqs.append(seq)
    nothing = Decodes(num_seqs, config.block_size)
    plan = build_plan(nothing, seqs, changed=seqs, has_sampling_extras=False, block_size=config.block_size)
    plan = plan._replace(table_delta=plan.table_delta[:0])  # tables are zeros, and may be shorter than such a step
    return plan if draft is not None else plan._replace(num_drafts=np.zeros_like(plan.num_drafts))


def load_engine(
    directory: Path,
    settings: Settings,
    *,
    after_deltas: Callable[[], None],
    on_lost: Callable[[WeftError], None],
    codec: TextCodec | None = None,
) -> Engine:
    """Load the model of the folder into a new engine, not started yet; without ``codec`` it takes no grammars.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, the architecture is not supported, or the settings do not fit the
            model.
    """
    model_config = read_config(directory)
    config = _with_dtype(settings.engine, model_config)
    if isinstance(model_config, ForeignConfig):
        config = replace(config, enable_cuda_graphs=False)  # its steps allocate, and wait for the device
    draft_config = read_draft_config(directory, config, model_config, has_weights=settings.has_weights)
    config = config.resolved(model_config, draft_config)
    model = _load_model(
        directory,
        model_config,
        config,
        has_weights=settings.has_weights,
        deterministic=config.deterministic,
        num_loras=config.num_lora_slots,
    )
    if model.lora is not None:
        for name, folder in config.adapters.items():
            model.lora.load(name, directory / folder)
    give_back_freed_memory()  # what was packed leaves holes as large as the weights
    proposer = load_proposer(directory, config, model, draft_config, has_weights=settings.has_weights)
    runner = make_runner(partial(ModelRunner, model, config, proposer=proposer), config, model_config, draft_config)
    config = replace(config, num_blocks=runner.num_blocks)
    runner.warm_up()
    weights = weights_digest(directory) if settings.has_weights else f"random, seed {max(config.seed, 0)}"
    mesh_key = settings.mesh_key.encode()
    return Engine(
        runner,
        config,
        model_config=model_config,
        metrics=EngineMetrics(config, model_config, weight_bytes=model.matrix_bytes),
        after_deltas=after_deltas,
        on_lost=on_lost,
        speculator=make_speculator(config, runner),
        lora=model.lora,
        block_key=mesh_key and blake2b(mesh_key, digest_size=32, person=b"kv blocks").digest(),
        block_fields=block_fields(config, model_config, weights),
        grammars=GrammarCompiler(
            None if codec is None else partial(codec.token_table, model_config.vocab_size),
            [token for token in model_config.eos_token_ids if token < model_config.vocab_size],
            timeout_s=config.grammar_timeout_s,
        ),
    )


def _load_model(
    folder: Path,
    model: TransformerConfig,
    config: EngineConfig,
    *,
    has_weights: bool,
    deterministic: bool,
    num_loras: int = 0,
) -> TransformerModel:
    dtype = getattr(torch, config.dtype)
    if isinstance(model, ForeignConfig):
        return _load_foreign(folder if has_weights else None, model, config)
    lora = LoraBank(model, num_loras, config.max_lora_rank, dtype, config.device) if num_loras else None
    if has_weights:
        weights = load_folder(folder, model, dtype=dtype, device=config.device)
    else:
        weights = dict(random_weights(model, max(config.seed, 0), dtype=dtype, device=config.device))
    return TransformerModel(
        model,
        weights,
        dtype=dtype,
        device=config.device,
        deterministic=deterministic,
        max_model_len=config.max_model_len,
        num_bits=config.num_bits,
        lora=lora,
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
