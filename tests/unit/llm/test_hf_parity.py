"""The forward pass against transformers on the same random weights, whole, in chunks, token by token and in batches."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.llm.config import TransformerConfig
from weft.llm.models.gemma import Gemma3
from weft.llm.models.gpt_oss import GptOss
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder

torch.set_num_threads(1)

_BLOCK_SIZE = 4
_TEXT_LEN = 45
_MAX_ABS_ERROR = 1e-4
_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
#: Class of the configuration in transformers, and what differs from ``_SHAPE``.
_CASES: dict[str, tuple[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("hf_parity.json").read_text())
del _CASES[""]


def _config_class(name: str) -> Any:
    import transformers

    return getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")


@dataclass(frozen=True)
class _Case:
    folder: Path
    config: TransformerConfig
    text: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="module", params=_CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Case:
    """A random model that transformers has saved, a text, and the logits that transformers gives it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name, changes = _CASES[request.param]
    torch.manual_seed(list(_CASES).index(request.param))
    theirs = getattr(transformers, f"{name}ForCausalLM")(_config_class(name)(**_SHAPE | changes))
    for parameter in theirs.parameters():
        # The initial weights are so small that a wrong mask or rotation would stay below the bound, and norms are 1.
        parameter.data.mul_(6.0) if parameter.dim() == 2 else parameter.data.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.eval().save_pretrained(folder, max_shard_size="60KB" if "3" in request.param else "5GB")
    text = torch.randint(0, _SHAPE["vocab_size"], (_TEXT_LEN,))
    with torch.no_grad():
        logits = theirs(text.unsqueeze(0)).logits[0]
    return _Case(folder, read_config(folder), text, logits)


class _Sequences:
    """A model and a small KV cache in which texts have their blocks; computes any pieces of them in one step."""

    def __init__(self, case: _Case, *, num_sequences: int = 1, deterministic: bool = False) -> None:
        self._model = TransformerModel(case.config, load_folder(case.folder, case.config), deterministic=deterministic)
        blocks_each = -(-_TEXT_LEN // _BLOCK_SIZE)
        num_blocks = 1 + num_sequences * blocks_each
        # What a step does not store is not a number, so that reading it would show.
        self._kv = self._model.new_kv(num_blocks, _BLOCK_SIZE).fill_(float("nan"))
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._tables = order.to(torch.int32).view(num_sequences, blocks_each)

    def step(self, *pieces: tuple[int, torch.Tensor, int]) -> list[torch.Tensor]:
        """Logits of each piece: of which sequence, which tokens, from which position."""
        rows = torch.tensor([row for row, tokens, _ in pieces for _ in tokens])
        positions = torch.cat([torch.arange(first, first + len(tokens)) for _, tokens, first in pieces])
        blocks = self._tables[rows, positions // _BLOCK_SIZE].long()
        lengths = [len(tokens) for _, tokens, _ in pieces]
        ends = [first + len(tokens) for _, tokens, first in pieces]
        hidden = self._model.forward(
            torch.cat([tokens for _, tokens, _ in pieces]).to(torch.int32),
            positions.to(torch.int32),
            self._kv,
            self._tables[[row for row, _, _ in pieces]],
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE,
            max(lengths),
            max(ends),
        )
        return list(self._model.logits(hidden).split(lengths))


def _in_chunks(sequences: _Sequences, text: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    chunks, first = [], 0
    for tokens in text.split(sizes):
        chunks += sequences.step((0, tokens, first))
        first += len(tokens)
    return torch.cat(chunks)


def _assert_far(case: _Case, **changes: Any) -> None:
    wrong = _Case(case.folder, replace(case.config, **changes), case.text, case.logits)
    error = (case.logits - _in_chunks(_Sequences(wrong), case.text, [_TEXT_LEN])).abs().max().item()
    assert 10 * _MAX_ABS_ERROR < error


def _assert_close(expected: torch.Tensor, actual: torch.Tensor) -> None:
    assert _MAX_ABS_ERROR > (expected - actual).abs().max().item()


def test_a_wrong_detail_shows(case: _Case) -> None:
    """With a frequency 1 % off, or a window one token off, the logits are far beyond the bound."""
    rope, window = case.config.rope, case.config.sliding_window
    if rope["rope_type"] != "yarn":
        # The ramp of type yarn has whole numbers for its ends, which so small a change would leave.
        _assert_far(case, rope=rope | {"rope_theta": rope["rope_theta"] * 1.01})
    if "factor" in rope and rope["rope_type"] != "dynamic":
        _assert_far(case, rope=rope | {"factor": rope["factor"] * 1.01})
    if window:
        _assert_far(case, sliding_window=window + 1)
        _assert_far(case, sliding_window=window - 1)
    if isinstance(case.config, GptOss):
        _assert_far(case, swiglu_alpha=1.6)
        _assert_far(case, swiglu_limit=case.config.swiglu_limit * 0.9)
    if isinstance(case.config, Gemma3):
        _assert_far(case, local_rope=case.config.local_rope | {"rope_theta": 303.0})
        _assert_far(case, query_pre_attn_scalar=21)


def test_whole_prompt(case: _Case) -> None:
    """One step over the whole text gives the logits of transformers, at every position."""
    _assert_close(case.logits, _in_chunks(_Sequences(case), case.text, [_TEXT_LEN]))


def test_chunks_and_single_tokens(case: _Case) -> None:
    """Chunks of odd sizes and then one token at a time give the logits of transformers too."""
    sizes = [1, 7, 16, 9, *[1] * 12]
    _assert_close(case.logits, _in_chunks(_Sequences(case), case.text, sizes))


def test_batched_with_others(case: _Case) -> None:
    """A step that mixes a prompt, a chunk and a single token of three sequences gives each its own logits."""
    sequences = _Sequences(case, num_sequences=3)
    sequences.step((0, case.text[:44], 0), (1, case.text[:20], 0))
    answer, chunk, prompt = sequences.step((0, case.text[44:], 44), (1, case.text[20:31], 20), (2, case.text[:13], 0))
    _assert_close(case.logits[44:], answer)
    _assert_close(case.logits[20:31], chunk)
    _assert_close(case.logits[:13], prompt)


def test_deterministic_mode(case: _Case) -> None:
    """In deterministic mode a text has bitwise the same logits whole, in chunks, token by token and among others."""
    whole = _in_chunks(_Sequences(case, deterministic=True), case.text, [_TEXT_LEN])
    _assert_close(case.logits, whole)
    for sizes in ([17, 1, 27], [1] * _TEXT_LEN, [40, *[1] * 5]):
        assert torch.equal(whole, _in_chunks(_Sequences(case, deterministic=True), case.text, sizes))
    sequences = _Sequences(case, num_sequences=4, deterministic=True)
    sequences.step((1, case.text[:19], 0), (3, case.text.flip(0)[:5], 0))
    last, first, middle = sequences.step((3, case.text[5:6], 5), (0, case.text, 0), (1, case.text[19:42], 19))
    assert torch.equal(whole, first)
    assert torch.equal(whole[19:42], middle)
    assert len(last) == 1
