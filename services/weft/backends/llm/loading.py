"""Loading of an engine from a Hugging Face folder; imports torch."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from weft.backends.llm.drafting import load_proposer, read_draft_config
from weft.backends.llm.make_runner import make_runner
from weft.backends.llm.settings import Settings
from weft.backends.llm.speculation import make_speculator
from weft.base.errors import WeftError
from weft.base.processes.malloc import give_back_freed_memory
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.engine import Engine
from weft.llm.metrics import EngineMetrics
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.runner import ModelRunner
from weft_kernels.linear.products import faster_dtype

_log = logging.getLogger("weft.model.llm")


def load_engine(
    directory: Path, settings: Settings, *, after_deltas: Callable[[], None], on_lost: Callable[[WeftError], None]
) -> Engine:
    """Load the model of the folder into a new engine, which is not started.

    Args:
        directory: Has ``config.json``, and safetensors files unless ``settings.has_weights`` is false.
        settings: Settings of the model.
        after_deltas: See ``Engine``.
        on_lost: See ``Engine``.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, the architecture is not supported, or the settings do not fit the
            model.
    """
    model_config = read_config(directory)
    config = _with_dtype(settings.engine, model_config)
    draft_config = read_draft_config(directory, config, model_config)
    config = config.resolved(model_config, draft_config)
    dtype = getattr(torch, config.dtype)
    if settings.has_weights:
        weights = load_folder(directory, model_config, dtype=dtype, device=config.device)
    else:
        weights = random_weights(model_config, max(config.seed, 0), dtype=dtype, device=config.device)
    model = TransformerModel(
        model_config,
        weights,
        dtype=dtype,
        device=config.device,
        deterministic=config.deterministic,
        max_model_len=config.max_model_len,
        num_bits=config.num_bits,
    )
    give_back_freed_memory()  # what was packed leaves holes as large as the weights
    proposer = load_proposer(directory, config, model, draft_config, has_weights=settings.has_weights)
    runner = make_runner(partial(ModelRunner, model, config, proposer=proposer), config, model_config, draft_config)
    config = replace(config, num_blocks=runner.num_blocks)
    runner.warm_up()
    return Engine(
        runner,
        config,
        model_config=model_config,
        metrics=EngineMetrics(config, model_config, weight_bytes=model.matrix_bytes),
        after_deltas=after_deltas,
        on_lost=on_lost,
        speculator=make_speculator(config, runner),
    )


def _with_dtype(config: EngineConfig, model: TransformerConfig) -> EngineConfig:
    """The configuration, with a type of computation where ``auto`` means another one than the model's."""
    if config.dtype != "auto" or config.device != "cpu" or model.dtype == "float32":
        return config
    fastest = faster_dtype(getattr(torch, model.dtype), (model.intermediate_size, model.hidden_size))
    name = str(fastest).removeprefix("torch.")
    if name != model.dtype:
        _log.info("computes in float32, which is faster than %s on this CPU; set 'dtype' to decide", model.dtype)
    return replace(config, dtype=name)
