"""Stages of a pipeline answer as one process does, and each has its layers alone."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.ranks import on_ranks
from tests.unit.llm.adapters import save_adapter
from tests.unit.llm.engine_fixture import Answer, random_prompts
from tests.unit.llm.speculation.proposers import SAMPLING_KINDS

from weft.base.errors import InvalidArgumentError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.engine_core import EngineCore
from weft.llm.metrics import EngineMetrics
from weft.llm.models.gemma import Gemma2
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import ARCHITECTURES, config_from_json
from weft.llm.models.stages import stages
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.parallel.groups import ALONE, Group, Groups
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.request import EngineRequest, SamplingParams
from weft.llm.runner import ModelRunner, StepTokens
from weft.llm.scheduler.decodes import Decodes, build_plan
from weft.llm.scheduler.micro_batches import split
from weft.llm.scheduler.plan import BlockTransfers, ForwardPlan
from weft.llm.scheduler.sequence import Sequence
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator
from weft.llm.weights.checkpoint import Checkpoint
from weft.llm.weights.parts import EMBEDDING

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CHANGES: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 16, "sliding_window": 24},
    "Gemma3": {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24},
    "Mistral": {"sliding_window": 24},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen2Moe": _MOE | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 16},
    "Qwen3Moe": _MOE | {"head_dim": 16},
}
_STEPS: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 6, "max_num_batched_tokens": 48}
_AHEAD = {"async_scheduling": "true"}
_TIER = {"num_blocks": 40, "watermark": 0.0, "kv_offload_bytes": 1 << 20, "deterministic": True}


def _config(name: str = "Llama", **changes: Any) -> TransformerConfig:
    fields = _SIZES | _CHANGES.get(name, {}) | changes
    return config_from_json(fields | {"architectures": [f"{name}ForCausalLM"]})


def _mixed() -> list[Answer]:
    """Requests of every kind of sampling, prompts of all lengths, some with a common beginning, long ones scored."""
    prompts = random_prompts(16, 1, 90, seed=4)
    kinds = [*SAMPLING_KINDS, {"allowed_token_ids": tuple(range(9, 50))}]
    kinds = [kinds[index % len(kinds)] for index in range(16)]
    return [
        Answer(
            prompts[0][:24] + prompt if index % 3 else prompt,
            max_tokens=4 + index,
            logprobs=index % 3,
            prompt_logprobs=index % 4 if len(prompt) > 60 else None,
            **kind,
        )
        for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def _plain() -> list[Answer]:
    """Requests that can be planned ahead."""
    return [
        Answer(prompt, max_tokens=8 + index, temperature=float(index % 2), seed=index, logprobs=index % 3)
        for index, prompt in enumerate(random_prompts(9, 1, 60, seed=5))
    ]


def _twice() -> list[Answer]:
    return _mixed() + _mixed()


def _repeating() -> list[Answer]:
    """Requests whose prompts repeat themselves."""
    return [Answer([*range(index, index + 6)] * 5, max_tokens=20, **kind) for index, kind in enumerate(SAMPLING_KINDS)]


def _few() -> list[Answer]:
    return _plain()[:1]


def _adapted() -> list[Answer]:
    """Requests of two adapters and of none."""
    return [
        Answer(prompt, max_tokens=6, lora_name=("", "a", "b")[index % 3])
        for index, prompt in enumerate(random_prompts(6, 1, 60, seed=6))
    ]


class _Case(NamedTuple):
    config: TransformerConfig
    answers: Callable[[], list[Answer]]
    options: Mapping[str, Any] = MappingProxyType({})


_CASES = {
    each.architecture: _Case(_config(each.architecture.removesuffix("ForCausalLM")), _mixed) for each in ARCHITECTURES
}
_CASES |= {
    "deterministic": _Case(_config(), _mixed, {"deterministic": True}),
    "ahead": _Case(_config(), _plain, {"deterministic": True, **_AHEAD}),
    "mixed ahead": _Case(_config(), _mixed, {"deterministic": True, **_AHEAD}),
    "few sequences": _Case(_config(), _few, _AHEAD),
    "chunks": _Case(_config(), _mixed, {"max_num_batched_tokens": 8}),
    "preempted": _Case(_config(), _twice, {"num_blocks": 40, "watermark": 0.0}),
    "tier": _Case(_config(), _twice, _TIER),
    "torn tier": _Case(_config(), _twice, _TIER),
    "int8 cache": _Case(_config(), _mixed, {"kv_cache_dtype": "int8"}),
    "bfloat16": _Case(_config(), _mixed, {"dtype": "bfloat16", "deterministic": True}),
    "adapters": _Case(_config(), _adapted, {"max_loras": 2}),
    "drafts": _Case(_config(), _repeating, {"speculation": "ngram"}),
}


#: Of every kind of step one; the others are long.
_QUICK = ["deterministic", "ahead", "torn tier", "adapters"]


class _SharingRunner(ModelRunner):
    """Has the tokens of the last rank at every rank, since in this test each has an engine of its own."""

    num_steps = num_parts = num_drafts = 0

    def run(self, plan: ForwardPlan) -> StepTokens:
        self.num_drafts += int(plan.num_drafts.sum())
        return _shared(super().run(plan))

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        collect = super().launch(plan)
        return lambda: _shared(collect())

    def _compute(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        self.num_steps += 1
        return super()._compute(plan)

    def _forward(self, plan: ForwardPlan, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_parts += 1
        return super()._forward(plan, token_ids)


def _shared(tokens: StepTokens) -> StepTokens:
    box = [tokens]
    if dist.is_initialized():
        dist.broadcast_object_list(box, dist.get_world_size() - 1)
    return box[0]


class _Facts(NamedTuple):
    """What the requests of a case were answered, and how."""

    tokens: list[list[list[int]]]
    logprobs: list[Any]
    reasons: list[list[str]]
    num_steps: int
    num_parts: int
    num_preemptions: int
    num_cached: int
    num_drafts: int
    num_loaded: int
    num_torn: int
    kv_shape: tuple[int, ...]


def _serve(groups: Groups, name: str, folder: str) -> _Facts:
    """Answer the requests of a case, some of which come later."""
    case = _CASES[name]
    config = EngineConfig(**_STEPS | dict(case.options)).resolved(case.config)
    dtype = getattr(torch, config.dtype)
    lora = LoraBank(case.config, config.max_loras, 8, dtype, "cpu") if config.max_loras else None
    weights = dict(random_weights(case.config, 3, groups=groups, by_outputs=config.deterministic))
    model = TransformerModel(
        case.config, weights, dtype=dtype, deterministic=config.deterministic, lora=lora, groups=groups
    )
    for adapter in "ab" if lora is not None else "":
        lora.load(adapter, Path(folder) / adapter)
    runner = _SharingRunner(model, config)
    runner.warm_up()
    if config.kv_offload_bytes and groups.pipeline.size > 1:
        runner.num_offload_blocks = (1 << 20) // (
            runner.kv.itemsize * runner.kv[0].numel() * 3 // len(model.stage.layers)
        )
    if name == "torn tier" and not model.stage.is_last:
        runner._store.run = _torn(runner._store.run)  # type: ignore[method-assign, union-attr]
    speculator = Speculator("ngram", FixedDepth(3), NgramProposer) if config.speculation == "ngram" else None
    metrics, clock = EngineMetrics(config, case.config), count()
    core = EngineCore(runner, config, case.config, metrics, lambda: next(clock), speculator, lora)
    answers = case.answers()
    waiting = list(answers)
    while waiting or core.has_requests:
        for answer in waiting[:2]:
            if answer.request.params.lora_name:
                core.acquire(answer.request)
            core.prepare(answer.request)
            core.admit(answer.request)
        del waiting[:2]
        core.step()
    core.pool.check()
    assert core.pool.num_used == 0
    runner.close()
    return _Facts(
        [answer.tokens for answer in answers],
        [(answer.logprobs, _scores(answer)) for answer in answers],
        [answer.reasons for answer in answers],
        runner.num_steps,
        runner.num_parts,
        core.scheduler.num_preemptions,
        metrics.num_cached_tokens,
        runner.num_drafts,
        core.pool.tier.num_loaded,
        core.pool.tier.num_failed,
        tuple(runner.kv.shape),
    )


def _torn(run: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Loses every second block that it loads."""

    def torn(kv: torch.Tensor, transfers: BlockTransfers) -> list[int]:
        failed = {*run(kv, transfers), *transfers.loads[::2, 1].tolist()}
        kv[list(failed)] = float("nan")
        return sorted(failed)

    return torn


def _scores(answer: Answer) -> list[Any]:
    pieces = [piece for delta in answer.deltas for piece in delta.prompt_logprobs or ()]
    num_top = answer.request.params.prompt_logprobs or 0
    return [piece.row(row, num_top) for piece in pieces for row in range(len(piece.sampled))]


def serve_all(groups: Groups, names: list[str], folder: str) -> dict[str, _Facts]:
    return {name: _serve(groups, name, folder) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        save_adapter(path / name, _config(), seed)
    return str(path)


@pytest.fixture(scope="module")
def alone(folder: str) -> Callable[[str], _Facts]:
    return cache(lambda name: _serve(ALONE, name, folder))


@pytest.fixture(scope="module")
def quick(folder: str) -> list[dict[str, _Facts]]:
    """Facts of some cases from each of two stages."""
    return on_ranks(ParallelSizes(pipeline=2), serve_all, _QUICK, folder)


def _assert_as_one(expected: _Facts, found: _Facts, name: str) -> None:
    assert expected.tokens == found.tokens
    assert expected.reasons == found.reasons
    if "deterministic" in _CASES[name].options:
        assert expected.logprobs == found.logprobs


@pytest.mark.parametrize("name", _QUICK)
def test_two_stages_answer_as_one_process(alone: Callable[[str], _Facts], quick: list[Any], name: str) -> None:
    """Tokens and reasons are the same, in deterministic mode log probabilities bit by bit, of both stages."""
    for found in quick:
        _assert_as_one(alone(name), found[name], name)


def test_what_two_stages_have_done(quick: list[Any]) -> None:
    """Steps were cut, what is in the cache was found, and blocks that one stage alone lost were computed again."""
    for found in quick:
        assert all(facts.num_parts > facts.num_steps for facts in found.values())
        assert found["ahead"].num_parts > 1.5 * found["ahead"].num_steps
        assert found["torn tier"].num_torn > 10
        assert found["deterministic"].num_cached > 0
    assert [2, 3] == [found["ahead"].kv_shape[1] for found in quick]


@pytest.mark.long
def test_every_architecture_on_two_stages(alone: Callable[[str], _Facts], folder: str) -> None:
    """Each, and all other cases, answer as one process; sequences were preempted, drafts verified, loads succeeded."""
    names = [name for name in _CASES if name not in _QUICK]
    for found in on_ranks(ParallelSizes(pipeline=2), serve_all, names, folder):
        for name in names:
            _assert_as_one(alone(name), found[name], name)
        assert found["preempted"].num_preemptions > 0
        assert found["drafts"].num_drafts > 0
        assert (0, True) == (found["tier"].num_torn, found["tier"].num_loaded > 10)


def test_more_stages_than_sequences(alone: Callable[[str], _Facts], folder: str) -> None:
    """Three stages answer as one process, where some parts of a step are empty too."""
    names = ["few sequences", "ahead"]
    for found in on_ranks(ParallelSizes(pipeline=3), serve_all, names, folder):
        for name in names:
            _assert_as_one(alone(name), found[name], name)


@pytest.mark.long
def test_stages_of_tensor_ranks(alone: Callable[[str], _Facts], folder: str) -> None:
    """Two stages of two tensor ranks each answer as one process; a rank's states go to its like of the next stage."""
    names = ["few sequences", "ahead", "mixed ahead", "deterministic", "adapters", Gemma2.architecture]
    for found in on_ranks(ParallelSizes(tensor=2, pipeline=2), serve_all, names, folder):
        assert (200, 1) == (found["adapters"].kv_shape[0], found["adapters"].kv_shape[-2])
        for name in names:
            _assert_as_one(alone(name), found[name], name)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen2Moe"])
def test_every_layer_and_weight_is_in_one_stage(name: str, count: int) -> None:
    """In order; the embedding is in two if the LM head shares it. Sizes differ by a layer and the LM head at most."""
    config = _config(name)
    divided = stages(config, count)
    assert [*range(config.num_layers)] == [layer for stage in divided for layer in stage.layers]
    for weight in config.weight_parts():
        is_shared = count > 1 and config.tie_word_embeddings and weight == EMBEDDING
        assert 1 + is_shared == sum(stage.has(weight) for stage in divided)


@pytest.mark.parametrize(
    ("vocab_size", "count", "expected"),
    [(96, 2, [4, 4]), (4000, 4, [1, 3, 3, 1]), (96, 3, [3, 2, 3]), (10**6, 8, [1] * 8), (1000, 2, [4, 4])],
)
def test_stages_are_cut_by_weights(vocab_size: int, count: int, expected: list[int]) -> None:
    """The first and the last have fewer layers the larger the vocabulary is, and each has one at least."""
    config = _config(vocab_size=vocab_size, num_hidden_layers=8)
    assert expected == [len(stage.layers) for stage in stages(config, count)]


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_stage_reads_its_own_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder it reads no other tensor; they are those of the whole model."""
    config, read = _config(name), set[str]()
    whole = random_weights(config, 3)
    stored = {}
    for weight, parts in config.weight_parts().items():
        rows = whole[weight].split([part.shape[0] for part in parts])
        stored |= {part.name: own.contiguous() for part, own in zip(parts, rows, strict=True)}
    save_file(stored, tmp_path / "model.safetensors")
    get = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, tensor, *cuts: read.add(tensor) or get(self, tensor, *cuts))
    for rank, stage in enumerate(stages(config, 2)):
        read.clear()
        loaded = load_folder(tmp_path, config, groups=Groups(pipeline=Group(rank, (0, 1))))
        own: dict[str, Any] = {weight: parts for weight, parts in config.weight_parts().items() if stage.has(weight)}
        assert {part.name for parts in own.values() for part in parts} == read
        assert own.keys() == loaded.keys()
        assert all(torch.equal(whole[weight], loaded[weight]) for weight in own)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_step(seed: int, count: int) -> None:
    """Each token and sample is in one part, a sequence's in order; they have like numbers of tokens."""
    random = np.random.default_rng(seed)
    lengths = np.sort(random.integers(1, 30, random.integers(1, 9)) * random.integers(0, 2, 1)).clip(1)
    plan = _plan(lengths.tolist())
    parts = split(plan, count)
    rows = np.concatenate([part.plan.slot_mapping for part in parts])
    assert [*range(lengths.sum())] == sorted(rows)
    for part, *_ in parts:
        ends = part.q_start[1:] - 1
        assert (part.positions[ends] + 1 == part.ctx_len).all()
        assert (part.max_q_len, part.max_ctx_len) == (np.diff(part.q_start).max(), part.ctx_len.max())
        assert (part.slots[np.searchsorted(part.q_start, part.sample_rows, "right") - 1] == part.sample_slots).all()
    for slot in plan.slots:
        positions = [
            part.positions[part.q_start[b] : part.q_start[b + 1]]
            for part, *_ in parts
            for b in np.flatnonzero(part.slots == slot)
        ]
        assert [*range(lengths[slot])] == np.concatenate(positions).tolist()
    assert [*range(len(lengths))] == sorted(np.concatenate([part.samples for part in parts]))
    if lengths.min() > 1:
        assert max(len(part.plan.token_ids) for part in parts) == -(-lengths.sum() // count)
    elif lengths.max() == 1:
        assert len(parts) == min(count, len(lengths))


def _plan(lengths: list[int]) -> ForwardPlan:
    """A step of sequences from their beginning; a token's slot in the cache is its row."""
    seqs = []
    for slot, length in enumerate(lengths):
        seq = Sequence(EngineRequest(np.zeros(length, np.int32), SamplingParams(), sink=lambda delta: None), slot)
        seq.slot, seq.num_scheduled, seq.block_table = slot, length, [0] * 8
        seqs.append(seq)
    plan = build_plan(Decodes(9, 4), seqs, changed=seqs, has_sampling_extras=False, block_size=4)
    return plan._replace(slot_mapping=np.arange(sum(lengths)))


@pytest.mark.parametrize("speculation", ["draft", "eagle3", "mtp"])
def test_drafts_of_models_are_refused(speculation: str) -> None:
    """Of other models' drafts one stage alone would know; the message says what to take."""
    with pytest.raises(InvalidArgumentError, match="speculation must be none or ngram with pipeline_parallel_size = 2"):
        EngineConfig(speculation=speculation, draft_model="x", pipeline_parallel_size=2)
