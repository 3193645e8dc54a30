"""C3 and the table of speculation: tokens per CPU-second with each proposer over those without, in turns."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.language_model.drive import Driver, Run, run_burst
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.permuting import known_text, permutation_models
from benchmarks.language_model.shapes import Model, Shape
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.trained_heads import METHODS, trained_head
from benchmarks.language_model.workloads import Job
from weft.backends.llm.loading import HOST_PROPOSERS, clock_of, measured_cost
from weft.backends.llm.text import TextCodec
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.device_state import DeviceProposer
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.runner import ModelRunner
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import DraftHead, HeadProposer
from weft.llm.speculation.speculator import AdaptiveDepth, CostCurve, DraftBalance, FixedDepth, Speculator

_WRITER = Path(__file__).resolve().parents[2] / "model_repository" / "model" / "writer" / "1"
_NUM_DRAFTS = 4
_ERROR_RATE = 0.2
_STEP_TOKENS = 128
_PROMPT_LEN = 64
_WRITER_CONTEXT = 512
_NOTE = (
    "Tokens per CPU-second of the engine's thread, over those of the same requests without speculation just before and "
    "just after; median of the rounds, and their spread. How far two runs without it differ shows what that can tell. "
    "The engine has as many slots as there are requests."
)
_WRITER_NOTE = (
    f"{_NOTE} It chooses the depth, up to 4 drafts. "
    "Prompts of 64 tokens from the end of Python's documentation; heads are trained on its beginning; the draft model "
    "is the first 2 of the model's 4 layers, untrained for that. Requires the samples (make models)."
)
_PERMUTATION_NOTE = (
    f"{_NOTE} It chooses the depth, up to 4 drafts. "
    f"Greedy; the text is a cycle of 16 tokens; the draft model is a layer of width 128 that errs at "
    f"{_ERROR_RATE:.0%} of the tokens."
)


class _Way(NamedTuple):
    """A proposer: its name, what makes it on the device, and the cost of steps with it, greedy and sampled."""

    name: str
    make: Callable[[], DeviceProposer] | None
    costs: tuple[CostCurve, ...] = ()

    def driver(self, model: Model, config: EngineConfig, depth: AdaptiveDepth, temperature: float) -> Driver:
        """An engine with this proposer, and with a depth of its own."""
        balance = None if isinstance(depth, FixedDepth) else DraftBalance()
        speculator = Speculator(self.name, depth, HOST_PROPOSERS.get(self.name), balance, clock_of(config))
        proposer = None if self.make is None else self.make()
        return Driver(model, config, temperature=temperature, speculator=speculator, proposer=proposer)


class _Turn(NamedTuple):
    """A run with a proposer between two without, and what its speculator counted."""

    before: Run
    run: Run
    after: Run
    speculator: Speculator

    @property
    def ratio(self) -> float:
        """Of the rate with the proposer to that without."""
        return mean((self.before.thread_s, self.after.thread_s)) / self.run.thread_s


def measure_ngram(model: Model, sizes: Sizes) -> list[Figure]:
    """C3: n-grams on a text that repeats, with always 4 drafts, and none."""
    target, _ = permutation_models("mid" if model.shape.name == "toy" else model.shape.name, 0.0)
    way = _Way("ngram", None)
    figures = []
    for num_seqs in (sizes.speculated_batches[0], sizes.speculated_batches[-1]):
        config = _config(target, num_seqs)
        jobs = _cycles(target, num_seqs, sizes.speculated_tokens)
        turns = list(_turns(target, config, jobs, [way], sizes.num_rounds, lambda way: FixedDepth(_NUM_DRAFTS)))
        what = f"n-grams, 4 drafts, {num_seqs} at a time, {target.shape.name}"
        target_ratio = Target(">=", 1.5) if num_seqs == 1 else None
        figures += _figures("C3", what, [turn[way.name] for turn in turns], target=target_ratio, note=_NOTE)
    return figures


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """The table: each proposer, on the permutation model and on ``writer``."""
    name = model.shape.name
    target, draft = permutation_models(name, _ERROR_RATE)
    text = known_text(target.shape.vocab_size, 16384)
    heads = _heads(target, text, sizes.head_steps // 2)
    figures = list(_table(target, f"permutation {name}", draft, heads, _cycles, sizes, (0.0,), _PERMUTATION_NOTE))
    if _WRITER.is_dir():
        figures += _measure_writer(sizes)
    return figures


def _measure_writer(sizes: Sizes) -> Iterator[Figure]:
    config = read_config(_WRITER)
    weights = load_folder(_WRITER, config)
    shape = Shape("writer", config.hidden_size, config.num_layers, config.intermediate_size, config.vocab_size)
    model = Model(shape, config, weights, TransformerModel(config, dict(weights)))  # type: ignore[arg-type]
    codec = TextCodec.from_folder(_WRITER, 1 << 24)
    if codec is None:
        raise FileNotFoundError(f"no tokenizer.json in {_WRITER}; make models builds it")
    text = "\n".join(topics.topics.values()).encode()
    ids = codec.ids(text, "documentation", adds_special_tokens=False, parses_special_tokens=False)[1]
    num_held_out = len(ids) // 8
    training = ids[:-num_held_out][: sizes.head_tokens].astype(np.int64)
    heads = _heads(model, training, sizes.head_steps)
    small = TransformerConfig(**(vars(config) | {"num_layers": 2}))
    draft = TransformerModel(small, {name: weight for name, weight in weights.items() if "layers.2" not in name})

    def jobs(model: Model, num_seqs: int, num_tokens: int) -> list[Job]:
        starts = np.linspace(len(ids) - num_held_out, len(ids) - _PROMPT_LEN, num_seqs).astype(int)
        return [Job(ids[start : start + _PROMPT_LEN], num_tokens) for start in starts.tolist()]

    yield from _table(model, "writer", draft, heads, jobs, sizes, (0.0, 1.0), _WRITER_NOTE)


def _table(
    model: Model,
    name: str,
    draft: TransformerModel,
    heads: dict[str, DraftHead],
    make_jobs: Callable[[Model, int, int], list[Job]],
    sizes: Sizes,
    temperatures: Sequence[float],
    note: str,
) -> Iterator[Figure]:
    """Figures of each proposer at each number of requests and temperature."""
    makers: dict[str, Callable[[], DeviceProposer] | None] = {
        "ngram": None,
        "draft": lambda: DraftModelProposer(draft, _STEP_TOKENS),
    }
    makers |= {method: partial(HeadProposer, head, _STEP_TOKENS) for method, head in heads.items()}
    ways = [_Way(kind, make, _costs(model, make, sizes.speculated_batches[-1])) for kind, make in makers.items()]
    for num_seqs in sizes.speculated_batches:
        jobs = make_jobs(model, num_seqs, sizes.speculated_tokens)
        for temperature in temperatures:
            turns = list(
                _turns(
                    model,
                    _config(model, num_seqs),
                    jobs,
                    ways,
                    sizes.speculated_rounds,
                    lambda way: AdaptiveDepth(_NUM_DRAFTS, *way.costs),
                    temperature,
                )
            )
            for way in ways:
                what = f"{name}, T={temperature:g}, {num_seqs} at a time: {way.name}"
                least = Target(">=", 0.98) if num_seqs == sizes.speculated_batches[-1] else None
                own = [turn[way.name] for turn in turns]
                yield from _figures("speculation", what, own, target=least, note=note)


def _figures(case: str, what: str, turns: Sequence[_Turn], *, target: Target | None, note: str) -> Iterator[Figure]:
    """Ratio of the rates with the proposer and without, both, acceptance, tokens of a step, how many answers differ."""
    counts = [turn.speculator for turn in turns]
    yield figure(case, what, [turn.ratio for turn in turns], "x", target=target, note=note)
    yield figure(case, "  two runs without", [turn.before.thread_s / turn.after.thread_s for turn in turns], "x")
    yield figure(case, "  tokens per CPU-s without", [_rate(turn.after) for turn in turns], "1/s")
    yield figure(case, "  tokens per CPU-s with", [_rate(turn.run) for turn in turns], "1/s")
    yield figure(case, "  drafts accepted", [100 * one.num_accepted / max(one.num_drafts, 1) for one in counts], "%")
    yield figure(case, "  tokens of a step with drafts", [one.mean_accepted_len for one in counts], "tokens")
    different = [
        sum(a.token_ids != b.token_ids for a, b in zip(turn.after.answers, turn.run.answers, strict=True))
        for turn in turns
    ]
    yield figure(case, "  answers that differ", different, "answers", target=Target("=", 0))


def _turns(
    model: Model,
    config: EngineConfig,
    jobs: Sequence[Job],
    ways: Sequence[_Way],
    num_rounds: int,
    make_depth: Callable[[_Way], AdaptiveDepth],
    temperature: float = 0.0,
) -> Iterator[dict[str, _Turn]]:
    """In each round one run with each proposer, and one without before the first and after each."""

    def without() -> Run:
        return run_burst(Driver(model, config, temperature=temperature), jobs)

    before = without()
    for _ in range(num_rounds):
        turn = {}
        for way in ways:
            driver = way.driver(model, config, make_depth(way), temperature)
            run, after = run_burst(driver, jobs), without()
            assert driver.engine.speculator is not None  # noqa: S101  # the driver has just been given it
            turn[way.name] = _Turn(before, run, after, driver.engine.speculator)
            before = after
        yield turn


def _rate(run: Run) -> float:
    return run.num_tokens / run.thread_s


def _costs(model: Model, make: Callable[[], DeviceProposer] | None, num_seqs: int) -> tuple[CostCurve, ...]:
    config = _config(model, num_seqs)
    runner = ModelRunner(model.network, config, proposer=None if make is None else make())
    num_drafts = 0 if make is None else _NUM_DRAFTS
    return tuple(
        measured_cost(config, runner, num_drafts=num_drafts, temperature=temperature) for temperature in (0.0, 1.0)
    )


def _config(model: Model, num_seqs: int) -> EngineConfig:
    return model.engine_config(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=_WRITER_CONTEXT,
        num_speculative_tokens=_NUM_DRAFTS,
    )


def _cycles(model: Model, num_seqs: int, num_tokens: int) -> list[Job]:
    """Prompts of one token each, of different cycles where there are as many."""
    starts = np.random.default_rng(0).permutation(model.shape.vocab_size)[:num_seqs].astype(np.int32)
    return [Job(starts[index : index + 1], num_tokens) for index in range(num_seqs)]


def _heads(model: Model, text: np.ndarray, num_steps: int) -> dict[str, DraftHead]:
    """A trained head of each method; EAGLE-3's reads three layers, and small models have two."""
    made = {}
    for method in METHODS if model.config.num_layers > 2 else ("mtp",):
        config, own = trained_head(method, model.config, model.weights, torch.from_numpy(text), num_steps)
        made[method] = DraftHead(config, own, model.network)
    return made
