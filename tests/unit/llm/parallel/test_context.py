"""Ranks along the context axis divide a step's tokens, and answer as one process does."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import on_ranks
from tests.unit.llm.adapters import save_adapter
from tests.unit.llm.engine_fixture import Answer, answer_all, make_engine, random_prompts
from tests.unit.llm.parallel.test_stages import serve_all
from tests.unit.llm.test_compositions import Life, check, nothing
from tests.unit.llm.test_lora import ARCHITECTURES, SIZES, make_model

from weft.llm.engine import Engine
from weft.llm.models.registry import config_from_json
from weft.llm.models.weights import random_weights
from weft.llm.parallel import context
from weft.llm.parallel.context import ContextShare, divide
from weft.llm.parallel.groups import ALONE, Groups
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.scheduler.plan import ForwardPlan
from weft_kernels.blocks.layout import cache_shape, split_layers

#: Case name and options of the engine; a window is shorter than the longest prompts, a chunk too.
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "int8 cache": ("Llama", {"kv_cache_dtype": "int8"}),
    "not deterministic": ("Llama", {"deterministic": False}),
}


_WITH_TENSOR_RANKS = ("Llama", "Gemma3", "GptOss", "not deterministic")


def _broadcast(plan: ForwardPlan | None = None) -> Any:
    box = [plan]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _lead(plan: ForwardPlan) -> None:
    """Let the other ranks run the step too."""
    _broadcast(plan)


def _follow(engine: Engine) -> None:
    while (plan := _broadcast()) is not None:
        engine._core._runner.launch(plan)()


def _answers(folder: Path, name: str, groups: Groups) -> list[Any] | None:
    """What an engine answers to prompts with adapters and without; None: this rank follows rank 0."""
    kind, options = _CASES[name]
    has_window = kind in ("Gemma2", "Gemma3", "GptOss")
    shape = SIZES | ARCHITECTURES[kind] | ({"sliding_window": 24} if has_window else {})
    config = config_from_json({"architectures": [f"{kind}ForCausalLM"], **shape})
    engine_options = {"deterministic": True, "max_num_batched_tokens": 48, "max_num_seqs": 6} | options
    is_exact = engine_options["deterministic"]
    weights = random_weights(config, 3, groups=groups, by_outputs=is_exact)
    model = make_model(config, weights, 2, deterministic=is_exact, groups=groups)
    for seed in (1, 2):
        model.lora.load(f"adapter {seed}", folder / kind / str(seed))
    is_alone = groups == ALONE
    if not is_alone and dist.get_rank():
        _follow(make_engine(model=model, **engine_options))
        return None
    engine = make_engine(model=model, before_step=nothing if is_alone else _lead, **engine_options)
    names = ("", "adapter 1", "", "adapter 2", "adapter 1", "", "")
    answers = [
        Answer(prompt, max_tokens=6, logprobs=1, prompt_logprobs=1 if index == 2 else None, lora_name=adapter)
        for index, (prompt, adapter) in enumerate(zip(random_prompts(7, 20, 90), names, strict=True))
    ]
    try:
        answer_all(engine, answers)
    finally:
        if not is_alone:
            _broadcast()
    assert [] == [answer.error for answer in answers if answer.error]
    scores = [answer.deltas[0].prompt_logprobs or () for answer in answers]
    return [
        (answer.tokens, answer.logprobs, [[part.tolist() for part in each] for each in own])
        for answer, own in zip(answers, scores, strict=True)
    ]


def _exchanged(groups: Groups, dtype: torch.dtype) -> bool:
    """Whether ranks that each store their part of a step's keys and values have the cache of one that stores all."""
    blocks, size, heads, width = 5, 4, 2, 8
    generator = torch.Generator().manual_seed(1)
    shape = cache_shape(blocks, 3, size, heads, width, dtype)
    whole = torch.randint(0, 100, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    slots = np.arange(size, blocks * size)[::-1].copy()
    starts, lengths = np.array([0, 3, len(slots)], np.int32), np.array([3, len(slots) + 9], np.int32)
    share = ContextShare(
        groups.context, starts, lengths, slots, np.empty(0, np.int32), block_size=size, upload=torch.from_numpy
    )
    own = torch.zeros_like(whole).view(dtype)
    for target, source in zip(
        split_layers(own, heads, width), split_layers(whole.view(dtype), heads, width), strict=True
    ):
        for to, given in zip(target, source, strict=True):
            if to is not None:
                at, off = np.divmod(slots[share.part.rows], size)
                to.view(torch.uint8)[at, :, off] = given.view(torch.uint8)[at, :, off]
        share.exchange(target)
    whole[0] = 0
    return torch.equal(own.view(torch.uint8), whole)


def facts(groups: Groups, folder: Path) -> dict[str, Any]:
    """All that the tests here compare, from one start of the ranks."""
    context.MIN_TOKENS["cpu"] = 1
    names = _CASES if groups.tensor.size == 1 else _WITH_TENSOR_RANKS
    found: dict[str, Any] = {name: _answers(folder, name, groups) for name in names}
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        found[str(dtype)] = _exchanged(groups, dtype)
    return found


def lives(groups: Groups) -> Counter[str]:
    """Rank 0 checks lives of engines, and the others follow it; returns what happened."""
    context.MIN_TOKENS["cpu"] = 1
    events = Counter[str]()
    for seed in range(8, 16):
        life = Life(seed)
        life.groups, life.before_step = groups, _lead
        if groups.context.rank:
            life.plain["model"].groups = groups
            _follow(make_engine(**life.options))
            continue
        try:
            events += check(life)
        finally:
            _broadcast()
    return events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of each architecture."""
    folder = tmp_path_factory.mktemp("adapters")
    for kind in ARCHITECTURES:
        config = config_from_json({"architectures": [f"{kind}ForCausalLM"], **SIZES, **ARCHITECTURES[kind]})
        for seed in (1, 2):
            save_adapter(folder / kind / str(seed), config, seed)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return on_ranks(ParallelSizes(context=2), facts, folder)


def _check(folder: Path, name: str, actual: Any) -> None:
    expected = _answers(folder, name, ALONE)
    if name == "not deterministic":
        expected, actual = ([tokens for tokens, *_ in answers] for answers in (expected, actual))
    assert expected == actual


@pytest.mark.parametrize("name", _CASES)
def test_answers_are_those_of_one_process(folder: Path, found: Any, name: str) -> None:
    """Tokens, and if deterministic every log probability of tokens and prompts, bit for bit."""
    _check(folder, name, found[0][name])


@pytest.mark.long
def test_answers_are_those_of_one_process_with_tensor_ranks_too(folder: Path) -> None:
    """Two by two ranks, each with half of the heads and half of the tokens."""
    found = on_ranks(ParallelSizes(tensor=2, context=2), facts, folder)
    for name in _WITH_TENSOR_RANKS:
        _check(folder, name, found[0][name])


def serve_divided(groups: Groups, names: list[str]) -> dict[str, Any]:
    """What a rank answers to the requests of cases of ``test_stages``."""
    context.MIN_TOKENS["cpu"] = 1
    return serve_all(groups, names, "")


@pytest.mark.long
def test_answers_are_those_of_one_process_with_stages_too() -> None:
    """Two stages of two context ranks, steps in parts and planned ahead, bit for bit; a state goes to its like."""
    names = ["ahead", "mixed ahead", "deterministic"]
    alone = serve_all(ALONE, names, "")
    for found in on_ranks(ParallelSizes(pipeline=2, context=2), serve_divided, names):
        assert [alone[name][:3] for name in names] == [found[name][:3] for name in names]


@pytest.mark.long
def test_every_combination_answers_as_one_process() -> None:
    """Lives of engines with windows, codes, drafts, preemptions and mishaps, each as ``test_compositions`` says."""
    events, _ = on_ranks(ParallelSizes(context=2), lives)
    assert 10 == len(events), events


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_caches_of_all_ranks_are_equal(found: Any, dtype: str) -> None:
    """What ranks store of a step is exchanged with its scales, to the last byte and to no other place."""
    assert [True, True] == [each[f"torch.{dtype}"] for each in found]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_parts_are_all_tokens_once(num_ranks: int) -> None:
    """Pieces are of one sequence each and know its tokens before them; costs differ by less than a piece's."""
    pick = np.random.default_rng(num_ranks)
    for _ in range(100):
        lengths = pick.choice([1, 1, 1, 3, 40, 1000], pick.integers(1, 30))
        lengths[0] += max(num_ranks - lengths.sum(), 0)
        q_start = np.append(0, lengths.cumsum()).astype(np.int32)
        ctx_len = (lengths + pick.integers(0, 500, len(lengths))).astype(np.int32)
        parts = divide(q_start, ctx_len, num_ranks)
        assert list(range(q_start[-1])) == sorted(np.concatenate([part.rows for part in parts]).tolist())
        most = -(-q_start[-1] // (2 * num_ranks))
        sizes = [len(part.rows) for part in parts]
        assert 0 < min(sizes)
        costs = [sum(np.diff(starts) * (lasts + context.KEYS_PER_TOKEN)) for _, _, starts, lasts in parts]
        assert max(costs) <= min(costs) + most * (ctx_len.max() + context.KEYS_PER_TOKEN)
        for rows, sequences, starts, lasts in parts:
            for piece, sequence in enumerate(sequences):
                own = rows[starts[piece] : starts[piece + 1]]
                assert 0 < len(own) <= most
                assert (np.diff(own) == 1).all()
                assert q_start[sequence] <= own[0] <= own[-1] < q_start[sequence + 1]
                assert q_start[sequence + 1] - 1 - own[-1] == ctx_len[sequence] - lasts[piece]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_long_prompt_is_an_equal_load(num_ranks: int) -> None:
    """Of a prompt of 8,000 tokens no rank has 1 % more tokens or scores than another."""
    parts = divide(np.array([0, 8000], np.int32), np.array([8000], np.int32), num_ranks)
    for loads in ([len(part.rows) for part in parts], [int(part.rows.sum()) for part in parts]):
        assert max(loads) < 1.01 * min(loads)
