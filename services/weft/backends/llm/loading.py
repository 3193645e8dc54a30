"""Loads an engine from a Hugging Face folder; imports torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.backends.llm.costs import make_speculator
from weft.backends.llm.parts import load_part, resolve
from weft.backends.llm.rank import part_of
from weft.backends.llm.settings import Settings
from weft.backends.llm.text import TextCodec
from weft.base.errors import WeftError
from weft.llm.engine import Engine
from weft.llm.grammar import GrammarCompiler
from weft.llm.metrics import EngineMetrics
from weft.llm.models.lora import LoraBank
from weft.llm.models.registry import read_config
from weft.llm.ranks.runner import GroupAdapters, GroupRunner
from weft.llm.runner import ModelRunner


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
        lora: LoraBank | None = GroupAdapters(model_config, config, group) if config.num_lora_slots else None
        weight_bytes = group.weight_bytes
    else:
        part = load_part(directory, settings, model_config, config, draft_config)
        runner, lora, weight_bytes = part.runner, part.model.lora, part.model.matrix_bytes
    try:
        if lora is not None:
            for name, folder in config.adapters.items():
                lora.load(name, directory / folder)
        config = replace(config, num_blocks=runner.num_blocks)
        engine = Engine(
            runner,
            config,
            model_config=model_config,
            metrics=EngineMetrics(config, model_config, weight_bytes=weight_bytes),
            after_deltas=after_deltas,
            on_lost=on_lost,
            speculator=make_speculator(config, runner),
            lora=lora,
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
