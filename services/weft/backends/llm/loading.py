"""Loads an engine from a Hugging Face folder, and measures what its steps take; imports torch."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from weft import __version__
from weft.backends.llm.parts import load_part, resolve
from weft.backends.llm.rank import part_of
from weft.backends.llm.settings import Settings
from weft.backends.llm.text import TextCodec
from weft.base.errors import WeftError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.engine import Engine
from weft.llm.engine_core import Runner
from weft.llm.grammar import GrammarCompiler
from weft.llm.metrics import EngineMetrics
from weft.llm.models.lora import LoraBank
from weft.llm.models.registry import read_config
from weft.llm.ranks.runner import GroupRunner
from weft.llm.request import NO_SPECULATION, EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.plan import UNKNOWN_TOKEN, ForwardPlan
from weft.llm.scheduler.sequence import Sequence
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import AdaptiveDepth, CostCurve, DraftBalance, ProposerFactory, Speculator

_log = logging.getLogger("weft.model.llm")

#: Proposers on the host; all others are the runner's.
HOST_PROPOSERS: dict[str, ProposerFactory] = {"ngram": NgramProposer}

#: Rows of a step whose time is measured, as far as the step and the time limit allow.
_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Steps per point, of which the fastest counts: at least, at most, and the time that is enough.
_MIN_RUNS, _MAX_RUNS = 3, 20
_RUNS_S = 0.05
_MAX_S = 1.5

#: Of files of weights.
_SUFFIXES = (".safetensors", ".gguf")
#: Of each part of a file its first bytes are read: 64 MiB of a model of 16 GiB, and small files whole.
_PART_BYTES, _READ_BYTES = 1 << 20, 4 << 10
_WHOLE_BYTES = 64 << 20


def make_speculator(config: EngineConfig, runner: Runner) -> Speculator | None:
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
    speculator = Speculator(config.speculation, depth, factory, DraftBalance(), clock_of(config))
    # Ranks cannot ask for the masks of drafts that they have made.
    speculator.skips_masked = factory is None and config.parallel_sizes.num_ranks > 1
    return speculator


def clock_of(config: EngineConfig) -> Callable[[], float]:
    """Seconds of the engine's thread, which vary less on a shared machine, if it alone computes; else of the clock."""
    computes_here = config.device == "cpu" and config.num_threads == 1 and config.parallel_sizes.num_ranks == 1
    return time.thread_time if computes_here else time.perf_counter


def measured_cost(config: EngineConfig, runner: Runner, *, num_drafts: int, temperature: float = 0.0) -> CostCurve:
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


def _fastest_s(config: EngineConfig, runner: Runner, plan: ForwardPlan) -> float:
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


def weights_digest(folder: Path) -> str:
    """Digest of the weight files of a folder: names, sizes, and pieces from all over each; below 64 MiB all of it.

    Pieces are so dense that a changed matrix of 1 MiB cannot go unseen, and take a hundredth of the time of a load.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{len(path.name)} {path.name} {size} ".encode())
            part_bytes, read_bytes = (_READ_BYTES,) * 2 if size <= _WHOLE_BYTES else (_PART_BYTES, _READ_BYTES)
            for start in range(0, size, part_bytes):
                digest.update(os.pread(file.fileno(), read_bytes, start))
    return digest.hexdigest()


def block_fields(config: EngineConfig, model: TransformerConfig, weights: str) -> dict[str, str]:
    """The ``fields`` of a ``BlockHasher``: what keys and values depend on.

    They are equal in two processes only where these compute the same. ``config`` is resolved for the
    model; ``weights``: ``weights_digest``, or what random weights were made from.
    """
    is_by_length = any(rope["rope_type"] == "longrope" for rope in model.ropes)
    return {
        "version": __version__,  # the layout of a block is that of the program
        "model": repr(model),
        "weights": weights,
        "device": config.device.partition(":")[0],
        "max_model_len": str(config.max_model_len) if is_by_length else "",
        **{
            name: str(getattr(config, name))
            for name in ("block_size", "deterministic", "dtype", "kv_dtype", "quantization")
        },
    }


def load_engine(
    directory: Path,
    settings: Settings,
    *,
    after_deltas: Callable[[], None],
    on_lost: Callable[[WeftError], None],
    codec: TextCodec | None = None,
    on_group: Callable[[GroupRunner], None] = lambda group: None,
) -> Engine:
    """Load the model of the folder into a new engine, not started yet; without ``codec`` it takes no grammars.

    ``on_group`` gets the ranks of a model that has several, before they are started.

    Raises:
        UnavailableError: A rank ended while it loaded.
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, the architecture is not supported, or the settings do not fit the
            model.
    """
    model_config = read_config(directory)
    config, draft_config = resolve(directory, settings, model_config)
    if config.parallel_sizes.num_ranks > 1:
        group = GroupRunner(config, part_of(directory, settings, config.dtype), model_config.vocab_size)
        on_group(group)
        group.start()
        runner: ModelRunner | GroupRunner = group
        lora = None
        if config.num_lora_slots:  # the table of names and slots is here, the matrices are in the ranks
            lora = LoraBank(model_config, config.num_lora_slots, config.max_lora_rank, torch.float32, "cpu")
            lora.write = group.write_adapter
        weight_bytes = group.weight_bytes
    else:
        model, runner = load_part(directory, settings, model_config, config, draft_config)
        lora, weight_bytes = model.lora, model.matrix_bytes
    try:
        if lora is not None:
            for name, folder in config.adapters.items():
                lora.load(name, directory / folder)
        config = replace(config, num_blocks=runner.num_blocks)
        weights = weights_digest(directory) if settings.has_weights else f"random, seed {max(config.seed, 0)}"
        mesh_key = settings.mesh_key.encode()
        engine = Engine(
            runner,
            config,
            model_config=model_config,
            metrics=EngineMetrics(config, model_config, weight_bytes=weight_bytes),
            after_deltas=after_deltas,
            on_lost=on_lost,
            speculator=make_speculator(config, runner),
            lora=lora,
            block_key=mesh_key and blake2b(mesh_key, digest_size=32, person=b"kv blocks").digest(),
            block_fields=block_fields(config, model_config, weights),
            grammars=GrammarCompiler(
                None if codec is None else partial(codec.token_table, model_config.vocab_size),
                [token for token in model_config.eos_token_ids if token < model_config.vocab_size],
                timeout_s=config.grammar_timeout_s,
            ),
        )
    except BaseException:
        runner.close()
        raise
    if isinstance(runner, GroupRunner):
        runner.watch(engine.lose)
    return engine
