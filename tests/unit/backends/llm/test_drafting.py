"""Loading of draft models and heads: they speculate, and what does not fit the model is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import Answer, finish
from tests.unit.llm.permutation_model import permutation
from tests.unit.llm.speculation.folders import CONFIG, write_model

from weft.backends.llm import loading
from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.config import EngineConfig
from weft.llm.engine import Engine
from weft.llm.speculation.speculator import FixedDepth
from weft.tools.train_heads import train_heads


def load(folder: Path, **config: Any) -> Engine:
    """The engine of a folder, with a cache of 64 blocks unless ``config`` says otherwise."""
    fields = {"num_blocks": 64, "max_num_seqs": 4} | config
    settings = Settings(EngineConfig(**fields), max_text_bytes=1000, has_weights=True)
    return load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)


def tokenizer(folder: Path, **ids: int) -> None:
    """A tokenizer's file in which some tokens have these ids."""
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}}))


def heads_of(folder: Path, output: Path, num_heads: int = 2) -> None:
    """Heads trained for a moment."""
    following, tokens = permutation(CONFIG["vocab_size"], 1), [0]
    for _ in range(639):
        tokens.append(int(following[tokens[-1]]))
    np.save(folder / "ids.npy", np.array(tokens))
    train_heads(folder, folder / "ids.npy", output, num_heads=num_heads, num_steps=200)


def answered(engine: Engine) -> list[int]:
    """Tokens behind token 3."""
    answer = Answer([3], max_tokens=31)
    engine.submit(answer.request)
    finish(engine, [answer])
    return answer.text


def test_each_proposer_is_loaded_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured by parameters alone, each has drafts accepted, and tokens are those of the model without it."""
    monkeypatch.setattr(loading, "AdaptiveDepth", lambda most, *costs: FixedDepth(most))  # whether they pay or not
    monkeypatch.setattr(loading, "DraftBalance", lambda: None)
    folder = write_model(tmp_path / "model")
    write_model(tmp_path / "draft", hidden_size=64, num_attention_heads=4)
    write_model(folder / "small", corrupted=0.2)
    heads_of(folder, folder / "heads")
    alone = answered(load(folder))
    ways: dict[str, dict[str, Any]] = {
        "draft": {"draft_model": "small"},
        "medusa": {"draft_model": "heads", "num_speculative_tokens": 2},
        "lookahead": {},
        "ngram": {},
    }
    for name, config in ways.items():
        engine = load(folder, speculation=name, **config)
        assert engine.speculator is not None
        assert answered(engine) == alone, name
        if name in ("draft", "medusa"):
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


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    """A folder that is missing, heads of another model, and fewer heads than drafts."""
    folder = write_model(tmp_path / "model")
    other = write_model(tmp_path / "other", seed=2)
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load(folder, speculation="draft", draft_model="nowhere")
    with pytest.raises(NotFoundError, match="weft train-heads"):
        load(folder, speculation="medusa", draft_model="nowhere")
    heads_of(other, tmp_path / "heads")
    with pytest.raises(InvalidArgumentError, match="are of another model"):
        load(folder, speculation="medusa", draft_model=str(tmp_path / "heads"))
    with pytest.raises(InvalidArgumentError, match=r"num_speculative_tokens must be at most 2, .* got 4"):
        load(other, speculation="medusa", draft_model=str(tmp_path / "heads"))
