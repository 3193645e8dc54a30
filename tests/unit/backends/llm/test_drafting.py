"""Loading of draft models and heads: they speculate, and what does not fit the model is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.llm.engine_fixture import Answer, finish
from tests.unit.llm.speculation.folders import CONFIG, trained_folders, write_model
from tests.unit.llm.speculation.heads import eagle3_folder, eagle3_json

from weft.backends.llm import loading
from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.config import EngineConfig
from weft.llm.engine import Engine
from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.registry import read_config
from weft.llm.speculation.speculator import FixedDepth
from weft.llm.weights.parts import LM_HEAD


def load(folder: Path, **config: Any) -> Engine:
    """The engine of a folder, with a cache of 64 blocks unless ``config`` says otherwise."""
    fields = {"num_blocks": 64, "max_num_seqs": 4} | config
    settings = Settings(EngineConfig(**fields), max_text_bytes=1000, has_weights=True)
    return load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)


def tokenizer(folder: Path, **ids: int) -> None:
    """A tokenizer's file in which some tokens have these ids."""
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}}))


def answered(engine: Engine) -> list[int]:
    """Tokens behind token 3."""
    answer = Answer([3], max_tokens=31)
    engine.submit(answer.request)
    finish(engine, [answer])
    return answer.text


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_proposer_is_loaded_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Configured by parameters alone, each has drafts accepted, and tokens are those of the model without it."""
    monkeypatch.setattr(loading, "AdaptiveDepth", lambda most, *costs: FixedDepth(most))  # whether they pay or not
    monkeypatch.setattr(loading, "DraftBalance", lambda: None)
    folder = write_model(tmp_path / "model")
    write_model(tmp_path / "draft", hidden_size=64, num_attention_heads=4)
    write_model(folder / "small", corrupted=0.2)
    alone = answered(load(folder))
    ways: dict[str, dict[str, Any]] = {
        "draft": {"draft_model": "small"},
        "ngram": {},
    }
    for name, config in ways.items():
        engine = load(folder, speculation=name, tensor_parallel_size=num_ranks, **config)
        assert engine.speculator is not None
        assert answered(engine) == alone, name
        if name == "draft":
            assert engine.speculator.num_accepted > 5, name
    assert answered(load(folder, speculation="draft", draft_model=str(tmp_path / "draft"))) == alone


def test_a_draft_model_shares_the_cache(tmp_path: Path) -> None:
    """Its keys and values count in ``kv_cache_bytes``: one of the target's size leaves half the blocks."""
    folder = write_model(tmp_path / "model")
    token_bytes = 2 * 32 * 4
    sizes = {"num_blocks": 0, "block_size": 16, "kv_cache_bytes": 40 * 16 * token_bytes}
    assert load(folder, **sizes).pool.num_blocks == 40
    assert load(folder, **sizes, speculation="draft", draft_model=str(folder)).pool.num_blocks == 20


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 64}, "must have the model's vocabulary of 32 tokens, got 64"),
        ({"max_position_embeddings": 32}, "must have a context of 64 tokens at least, got 32"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """Another vocabulary, a shorter context, an architecture that is not supported."""
    folder = write_model(tmp_path / "model")
    other = write_model(tmp_path / "draft", **{key: value for key, value in changes.items() if key != "architectures"})
    if "architectures" in changes:
        (other / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(InvalidArgumentError, match=problem):
        load(folder, speculation="draft", draft_model=str(other))


def test_a_shorter_context_is_enough_for_shorter_sequences(tmp_path: Path) -> None:
    """With ``max_model_len`` of the draft model's context it is taken."""
    folder = write_model(tmp_path / "model")
    write_model(folder / "small", max_position_embeddings=32)
    assert len(answered(load(folder, speculation="draft", draft_model="small", max_model_len=32))) == 31


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Vocabularies of one size can differ: a token with another id is named."""
    folder = write_model(tmp_path / "model")
    small = write_model(folder / "small")
    tokenizer(folder, a=0, b=1)
    tokenizer(small, a=0, b=1)
    load(folder, speculation="draft", draft_model="small")
    tokenizer(small, a=1, b=0)
    with pytest.raises(InvalidArgumentError, match="another id for 'a'"):
        load(folder, speculation="draft", draft_model="small")
    (small / "tokenizer.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match="must hold a JSON object"):
        load(folder, speculation="draft", draft_model="small")


def test_a_draft_model_sees_no_more_than_a_window(tmp_path: Path) -> None:
    """Blocks behind the model's window are freed, so a draft model must not need them."""
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
    folder = write_model(tmp_path / "model", sliding_window=16, **mistral)
    for window in (None, 32):
        small = write_model(folder / f"small{window}", sliding_window=window, **mistral)
        with pytest.raises(InvalidArgumentError, match="a sliding window of at most 16 tokens"):
            load(folder, speculation="draft", draft_model=small.name)
    write_model(folder / "small", sliding_window=16, **mistral)
    assert answered(load(folder, speculation="draft", draft_model="small")) == answered(load(folder))


def test_heads_are_loaded_and_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By parameters alone, a MiMo drafts with its own MTP layer, or with an EAGLE-3 head beside it."""
    monkeypatch.setattr(loading, "AdaptiveDepth", lambda most, *costs: FixedDepth(most))
    monkeypatch.setattr(loading, "DraftBalance", lambda: None)
    folder, plain = trained_folders(tmp_path)
    alone = answered(load(plain))
    for config in ({"speculation": "none"}, {"speculation": "mtp"}, {"speculation": "eagle3", "draft_model": "eagle3"}):
        engine = load(folder, **config)
        assert answered(engine) == alone
        if engine.speculator is not None:
            assert engine.speculator.num_accepted >= 0.6 * engine.speculator.num_drafts > 10, config


def test_a_head_takes_memory_of_the_cache(tmp_path: Path) -> None:
    """Its keys, values and states count in ``kv_cache_bytes``."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2)
    head = eagle3_folder(tmp_path / "head", folder)
    sizes = {"num_blocks": 0, "block_size": 16, "kv_cache_bytes": 40 * 16 * (4 * 32 * 4)}
    assert load(folder, **sizes).pool.num_blocks == 40
    token_bytes = 4 * (4 * 32 + 2 * 12 + 32)
    found = load(folder, **sizes, speculation="eagle3", draft_model=str(head)).pool.num_blocks
    assert found == sizes["kv_cache_bytes"] // (16 * token_bytes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures must be that of an EAGLE-3 head"),
        ({"vocab_size": 64}, "must have the model's vocabulary of 32 tokens, got 64"),
        ({"target_hidden_size": 64}, "target_hidden_size must be 32"),
        ({"hidden_size": 64}, "hidden_size must be 32, that of the model, whose tensors it shares, got 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"draft_vocab_size": 16}, r"'lm_head.weight' .* must have shape \[16, 32\]"),
        ({"draft_vocab_size": -1}, "draft_vocab_size must be a whole number above 0"),
        ({"fc_norm": True}, "fc_norm must be absent"),
        ({"norm_output": False}, "norm_output must be True, or absent"),
        ({"norm_before_fc": True}, "norm_before_fc must be False, or absent"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "3 different layers of the model, which has 2"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "3 different layers of the model, which has 2"),
        ({"eagle_aux_hidden_state_layer_ids": "low"}, "3 different layers of the model, which has 2, got 'low'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config must be"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
        ({"num_key_value_heads": 2}, r"k_proj.weight' .* must have shape \[24, 64\], got \[12, 64\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """What the head is, or is of, that Weft does not run; each by the name of its field."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2)
    head = eagle3_folder(tmp_path / "head", folder, **changes)
    with pytest.raises(InvalidArgumentError, match=problem):
        load(folder, speculation="eagle3", draft_model=str(head))


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (None, "'d2t' must be whole numbers, one for each of draft_vocab_size = 21 tokens, got none"),
        (torch.zeros(21), r"'d2t' must be whole numbers.* got F32 \[21\]"),
        (torch.zeros(20, dtype=torch.int64), r"got I64 \[20\]"),
        (torch.full((21,), 12), "'d2t' must lead to different tokens of the model's 32, got ids from 12 to 32"),
        (-torch.arange(21), "'d2t' must lead to different tokens of the model's 32, got ids from 0 to 0"),
    ],
)
def test_wrong_tables_of_tokens_are_refused(tmp_path: Path, stored: torch.Tensor | None, problem: str) -> None:
    """A head whose tokens are not the target's, by its table of differences."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2)
    head = eagle3_folder(tmp_path / "head", folder)
    tensors = load_file(head / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors if stored is None else tensors | {"d2t": stored}, head / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=problem):
        load(folder, speculation="eagle3", draft_model=str(head))


def test_names_and_layers_of_both_formats_are_read(tmp_path: Path) -> None:
    """What SpecForge and vLLM's speculators write of the same head is the same head."""
    folder = write_model(tmp_path / "model", num_hidden_layers=8)
    target = read_config(folder)
    forge = eagle3_json(target)
    del forge["eagle_aux_hidden_state_layer_ids"]
    indices = forge | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    outer = {"architectures": ["Eagle3Speculator"], "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    nested = outer | {"draft_vocab_size": forge["draft_vocab_size"], "transformer_layer_config": forge}
    names = {"midlayer.": ["midlayer.hidden_norm.weight"], "layers.0.": ["layers.0.hidden_norm.weight"]}
    made = [
        eagle3_config(described, [LM_HEAD, *names[prefix]], target)
        for described, prefix in ((forge, "midlayer."), (indices, "midlayer."), (nested, "layers.0."))
    ]
    assert [each.taps for each in made] == [(2, 4, 5)] * 3
    assert replace(made[2], tensor_prefix="midlayer.") == made[0] == made[1]
    assert {part.name.split(".")[0] for parts in made[2].weight_parts().values() for part in parts} == {
        "layers", "fc", "norm", "lm_head",
    }  # fmt: skip


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    """A folder that is missing or has no weights, and models that have no such layer."""
    folder = write_model(tmp_path / "model")
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load(folder, speculation="draft", draft_model="nowhere")
    with pytest.raises(NotFoundError, match="give the folder of an EAGLE-3 head"):
        load(folder, speculation="eagle3", draft_model="nowhere")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text(json.dumps(eagle3_json(read_config(folder))))
    with pytest.raises(NotFoundError, match=r"no model\.safetensors"):
        load(folder, speculation="eagle3", draft_model="empty")
    with pytest.raises(InvalidArgumentError, match="mtp for LlamaForCausalLM, which has no such layer that Weft runs"):
        load(folder, speculation="mtp")
    without = write_model(tmp_path / "mimo", architectures=["MiMoForCausalLM"])
    with pytest.raises(InvalidArgumentError, match=r"model\.mtp_layers\.0\..* missing"):
        load(without, speculation="mtp")
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"})
    )
    with pytest.raises(InvalidArgumentError, match="eagle3 for CohereForCausalLM, which runs through transformers"):
        load(folder, speculation="eagle3", draft_model="empty")
