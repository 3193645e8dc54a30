"""A model that tensor ranks compute together: what each reads, and that logits and answers are those of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from tests.case_files import says
from tests.ranks import on_ranks
from tests.unit.llm.adapters import save_adapter
from tests.unit.llm.engine_fixture import MODEL, Answer, preempt, random_prompts, serve
from tests.unit.llm.quantized_folders import EXPERTS, FORMATS, save_folder
from tests.unit.llm.speculation.heads import random_head
from tests.unit.llm.test_gguf import write_gguf
from tests.unit.llm.test_gpt_oss import write_models
from tests.unit.llm.test_lora import logits_of

from weft.base.errors import InvalidArgumentError
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.registry import ARCHITECTURES, config_from_json, read_config
from weft.llm.models.sharding import Shard, check_sizes
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.parallel.groups import ALONE, Group, Groups
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator
from weft.llm.weights.codes import cut
from weft.llm.weights.parts import Part, fused_shape

torch.set_num_threads(1)

#: The vocabulary cannot be divided evenly.
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 95,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CHANGES: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "Olmo2": {"attention_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen2Moe": {**_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 32},
    "Qwen3Moe": _MOE,
}
_NAMES = [each.architecture.removesuffix("ForCausalLM") for each in ARCHITECTURES]
_ADAPTED = ("Llama", "Phi3", "Qwen2Moe", "Gemma2")
_FORMATS = (
    "gptq act-order", "awq", "nf4 double", "nf4 blocks across outputs", "bitsandbytes 8 bits", "fp8 by block",
    "compressed asymmetric", "compressed int8", "compressed fp8",
)  # fmt: skip
_SPECULATION = ("ngram", "draft", "eagle3", "mtp")
#: Log probabilities and logits are sums in another order, of numbers near 1.
_MAX_ABS_ERROR = 1e-5
_TEXTS = [torch.randint(1, 40, (size,), generator=torch.Generator().manual_seed(size)) for size in (9, 1, 30)]


def _config(name: str, **changes: Any) -> TransformerConfig:
    return config_from_json({"architectures": [f"{name}ForCausalLM"], **_SIZES, **_CHANGES.get(name, {}), **changes})


def _logits(model: TransformerModel, slots: list[int] | None = None) -> torch.Tensor:
    return torch.cat(logits_of(model, _TEXTS, slots))


def _random(config: TransformerConfig, groups: Groups, **options: Any) -> TransformerModel:
    weights = random_weights(config, 3, groups=groups, by_outputs=bool(options.keys() & {"deterministic", "num_bits"}))
    return TransformerModel(config, dict(weights), groups=groups, **options)


def random_logits(groups: Groups, names: list[str], **changes: Any) -> dict[str, torch.Tensor]:
    """Logits of random models, in deterministic mode and not."""
    found = {}
    for name in names:
        config = _config(name, **changes)
        found[name] = _logits(_random(config, groups))
        found[f"{name}, deterministic"] = _logits(_random(config, groups, deterministic=True))
    return found


def _with_adapter(groups: Groups, folder: Path, name: str, **options: Any) -> torch.Tensor:
    config = _config(name)
    bank = LoraBank(config, 2, 8, torch.float32, "cpu")
    model = _random(config, groups, lora=bank, **options)
    bank.load("own", folder / name)
    return _logits(model, [bank.adapters[0].slot, -1, bank.adapters[0].slot])


def _of_folder(groups: Groups, folder: Path) -> torch.Tensor:
    config = read_config(folder)
    weights = load_folder(folder, config, dtype=torch.float32, groups=groups)
    return _logits(TransformerModel(config, weights, groups=groups))


def _drafting(name: str, model: TransformerModel) -> dict[str, Any]:
    if name == "ngram":
        return {"speculator": Speculator(name, FixedDepth(3), NgramProposer)}
    if name == "draft":
        proposer = DraftModelProposer(_random(MODEL, ALONE), 64)
    else:
        proposer = HeadProposer(random_head(name, model), 64)
    return {"speculator": Speculator(name, FixedDepth(3)), "proposer": proposer}


def engine_answers(groups: Groups) -> dict[str, Any]:
    """Tokens and log probabilities of engines that differ in how they come to them."""
    prompts = random_prompts(6, 3, 40, seed=9)
    prompts[3:] = [prompts[0] * 3 + prompt for prompt in prompts[3:]]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}, {"repetition_penalty": 1.3}]
    model = _random(MODEL, groups, deterministic=True)
    ways: dict[str, Callable[[list[Answer]], Any]] = {
        "chunks and prefix cache": partial(serve, model=model, max_num_batched_tokens=16, max_num_seqs=2),
        "preemption": partial(preempt, model=model),
    }
    ways |= {name: partial(serve, model=model, **_drafting(name, model)) for name in _SPECULATION}
    found = {}
    for name, run in ways.items():
        own, num_new = (prompts, 12) if name != "preemption" else (random_prompts(6, 20, 40), 50)
        answers = [
            Answer(prompt, max_tokens=num_new, logprobs=2, **kinds[index % 3]) for index, prompt in enumerate(own)
        ]
        engine = run(answers)
        counts = None if engine.speculator is None else (engine.speculator.num_drafts, engine.speculator.num_accepted)
        found[name] = ([(answer.tokens, answer.logprobs, answer.reasons) for answer in answers], counts)
    return found


def everything(groups: Groups, folder: Path) -> dict[str, Any]:
    """All that is compared between one process and two."""
    found: dict[str, Any] = random_logits(groups, _NAMES)
    found |= {f"{name}, int{bits}": _logits(_random(_config(name), groups, num_bits=bits))
              for name in ("Llama", "Phi3") for bits in (8, 4)}  # fmt: skip
    for name in _ADAPTED:
        found[f"{name}, adapter"] = _with_adapter(groups, folder, name)
        found[f"{name}, adapter, deterministic"] = _with_adapter(groups, folder, name, deterministic=True)
    found |= {path.name: _of_folder(groups, path) for path in sorted(folder.glob("codes of *"))}
    return found | engine_answers(groups)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process finds, and what each of two ranks does."""
    folder = tmp_path_factory.mktemp("models")
    for name in _ADAPTED:
        save_adapter(folder / name, _config(name), 5)
    for name in _FORMATS:
        save_folder(folder / f"codes of {name}", *FORMATS[name])
    save_folder(folder / "codes of experts in gptq", *FORMATS["gptq act-order"], config=EXPERTS)
    write_models(folder / "gpt_oss")[0].rename(folder / "codes of mxfp4")
    for kind in ("Q4_K", "Q8_0", "F16"):
        path = folder / f"codes of gguf {kind}"
        path.mkdir()
        write_gguf(path, lambda name, kind=kind: gguf.GGMLQuantizationType[kind])  # type: ignore[misc]
    return everything(ALONE, folder), on_ranks(ParallelSizes(tensor=2), everything, folder)


def _unequal(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[str]:
    """Names of what is not bitwise equal everywhere."""
    return [
        name
        for name, expected in alone.items()
        for found in ranks
        if not (torch.equal(expected, found[name]) if torch.is_tensor(expected) else expected == found[name])
    ]


@pytest.mark.long
def test_answers_are_those_of_one_process(compared: Any) -> None:
    """Bitwise in deterministic mode, of codes, and of engines: chunks, prefix cache, preemption, drafts, adapters."""
    alone, ranks = compared
    is_rounded = {"experts in gptq", "mxfp4", "gguf F16"}  # sums of experts, and of numbers, in another order
    exact = {
        name
        for name in alone
        if not torch.is_tensor(alone[name])
        or name.endswith(("deterministic", "int8", "int4"))
        or (name.startswith("codes of ") and name.removeprefix("codes of ") not in is_rounded)
    }
    assert [] == _unequal({name: alone[name] for name in exact}, ranks)
    assert all(counts is None or counts[0] > 10 for _, counts in (alone[name] for name in _SPECULATION))


@pytest.mark.long
def test_logits_are_near_those_of_one_process(compared: Any) -> None:
    """Partial sums of ranks change the last digits alone, in every architecture; and all ranks have the same ones."""
    alone, ranks = compared
    tensors = {name: logits for name, logits in alone.items() if torch.is_tensor(logits) and "mxfp4" not in name}
    errors = {name: float((logits - ranks[0][name]).abs().max()) for name, logits in tensors.items()}
    assert {} == {name: error for name, error in errors.items() if error > _MAX_ABS_ERROR * alone[name].abs().max()}
    assert [] == _unequal(ranks[0], ranks[1:])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_random_models(size: int) -> None:
    """A norm over all heads, experts and a shared one; of four ranks, two share a head of keys and values."""
    names = ["Llama", "Olmo2", "Qwen2Moe"]
    alone, ranks = random_logits(ALONE, names), on_ranks(ParallelSizes(tensor=size), random_logits, names)
    assert [] == _unequal({name: alone[name] for name in alone if "deterministic" in name}, ranks)
    assert all(float((alone[name] - ranks[-1][name]).abs().max()) < _MAX_ABS_ERROR for name in names)


@pytest.mark.parametrize("name", _NAMES)
def test_a_rank_reads_its_slices(tmp_path: Path, name: str) -> None:
    """Of any files, with fused tensors and those of all experts too, a rank has the slices of the whole weights."""
    config = _config(name)
    generator = torch.Generator().manual_seed(1)
    parts = [part for parts in config.weight_parts().values() for part in parts]
    shapes = {part.name: part.stored or part.shape for part in parts}
    save_file({name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    whole = load_folder(tmp_path, config)
    for by_outputs in (False, True):
        for rank in range(4):
            groups = Groups(tensor=Group(rank, (0, 1, 2, 3)))
            own = load_folder(tmp_path, config, groups=groups, by_outputs=by_outputs)
            assert own.keys() == whole.keys()
            for key, parts in config.weight_parts().items():
                pieces = Shard(config, rank, 4).pieces(key, [Part(key, fused_shape(parts))], by_outputs=by_outputs)
                assert torch.equal(cut(whole[key], pieces[0]), own[key]), key  # type: ignore[arg-type]
                assert own[key].numel() < whole[key].numel() / 2 or whole[key].numel() < 500  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "words"),
    [
        (
            "Llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            (4,),
            "one of 1, 3, 6 for this LlamaForCausalLM, got 4: it divides num_attention_heads = 6, hidden_size = ...",
        ),
        ("Llama", {}, (0,), "tensor_parallel_size must be one of 1, 2, 4 for ..., got 0: ..."),
        ("Llama", {"num_attention_heads": 12, "num_key_value_heads": 4}, (6,), "num_key_value_heads = 4 or is a ..."),
        ("Mixtral", {"num_local_experts": 3}, (2,), "must be one of 1 for ... num_experts = 3, ..."),
        ("Llama", {}, (2, 3), "pipeline_parallel_size must be from 1 to num_hidden_layers = 2, got 3; lower it"),
        ("Cohere", {}, (2,), "must be 1 for CohereForCausalLM, which runs through transformers, got 2, 1, 1; ..."),
    ],
)
def test_sizes_that_do_not_fit(name: str, changes: dict[str, Any], sizes: tuple[int, ...], words: str) -> None:
    """The message says what divides the model, and what to change."""
    width = 66 if changes.get("num_attention_heads") == 6 else 64
    kind = {"model_type": "cohere"} if name == "Cohere" else {}
    with pytest.raises(InvalidArgumentError) as caught:
        check_sizes(_config(name, **changes, **kind, hidden_size=width), ParallelSizes(*sizes))
    assert says(words, str(caught.value))


def test_sizes_that_fit() -> None:
    """Every number of ranks that the message allows; heads of keys are shared by ranks where there are fewer."""
    for size in (1, 2, 4):
        check_sizes(_config("Qwen2Moe"), ParallelSizes(tensor=size, pipeline=3))
    own = _config("Qwen2Moe").of_rank(4)
    assert (1, 1, 24, 1, 8, 25) == (
        own.num_heads, own.num_kv_heads, own.intermediate_size, own.num_experts_of(".experts."),
        own.shared_size, own.vocab_size,  # type: ignore[attr-defined]
    )  # fmt: skip
