"""Weights: what folders may hold, what the errors say, what is drawn from a seed, and the model whose text is known."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.case_files import Case, cases
from tests.unit.llm.permutation_model import permutation, permutation_weights

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, WeftError
from weft.llm.config import TransformerConfig
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.weights.parts import LM_HEAD

torch.set_num_threads(1)

_CONFIG = TransformerConfig(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    has_qkv_bias=True,
    has_qk_norm=True,
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_Tensors = dict[str, torch.Tensor]


def _tensors() -> _Tensors:
    """The tensors of a folder, each with numbers of its own."""
    generator = torch.Generator().manual_seed(0)
    parts = [part for parts in _CONFIG.weight_parts().values() for part in parts]
    return {part.name: torch.randn(part.shape, generator=generator) for part in parts}


def _save(folder: Path, tensors: _Tensors) -> None:
    save_file(tensors, folder / _SINGLE)


def _save_sharded(folder: Path, tensors: _Tensors) -> dict[str, str]:
    """Every third tensor in the same file; returns the index that is written."""
    index = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(index.values())):
        save_file({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    _save_index(folder, index)
    return index


def _save_index(folder: Path, index: object) -> None:
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("save", [_save, _save_sharded])
def test_parts_are_joined(tmp_path: Path, save: Callable[[Path, _Tensors], object]) -> None:
    """Queries, keys and values are one weight, gate and up another, in this order; from one file or several."""
    tensors = _tensors()
    save(tmp_path, tensors)
    weights = load_folder(tmp_path, _CONFIG)
    assert list(_CONFIG.weight_parts()) == list(weights)
    prefix = "model.layers.1."
    for name, parts in (("qkv_proj.weight", "qkv"), ("qkv_proj.bias", "qkv")):
        kind = name.partition(".")[2]
        joined = torch.cat([tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in parts])
        assert torch.equal(joined, weights[f"{prefix}self_attn.{name}"])
    joined = torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(joined, weights[f"{prefix}mlp.gate_up_proj.weight"])
    assert torch.equal(tensors[LM_HEAD], weights[LM_HEAD])


def test_type(tmp_path: Path) -> None:
    """Weights become what the configuration says, or what is asked for, from any type of number."""
    tensors = {name: tensor.to(torch.float16) for name, tensor in _tensors().items()}
    _save(tmp_path, tensors)
    assert {torch.float32} == {weight.dtype for weight in load_folder(tmp_path, _CONFIG).values()}
    weights = load_folder(tmp_path, _CONFIG, dtype=torch.bfloat16)
    assert torch.equal(tensors[LM_HEAD].to(torch.bfloat16), weights[LM_HEAD])


def test_what_follows_from_others(tmp_path: Path) -> None:
    """Old folders hold the frequencies of rotation, and tied ones the logits' weight: neither is read."""
    tensors = _tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    _save(tmp_path, tensors)
    assert LM_HEAD in load_folder(tmp_path, _CONFIG)
    assert LM_HEAD not in load_folder(tmp_path, replace(_CONFIG, tie_word_embeddings=True))


class Folder:
    """Runs a case of ``weights.txt``."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors, self.kind = path, _tensors(), "INVALID_ARGUMENT"
        self.file = path / _SINGLE
        self.index_of: dict[str, str] = {}
        self.next_file = ""
        self.words: list[str] = []
        _save(path, self.tensors)

    def run(self, lines: list[str]) -> None:
        for line in lines:
            command, _, rest = line.partition(" ")
            getattr(self, command)(*([rest] if command in ("says", "index_is") else rest.split(" ", 2) if rest else []))
        with pytest.raises(WeftError) as caught:
            load_folder(self.path, _CONFIG)
        assert self.kind == caught.value.code
        assert [] == [words for words in self.words if words.replace("NEXT", self.next_file) not in str(caught.value)]

    def sharded(self) -> None:
        self.file.unlink()
        self.index_of = _save_sharded(self.path, self.tensors)

    def without(self, name: str) -> None:
        del self.tensors[name]
        _save(self.path, self.tensors)

    def only(self, name: str) -> None:
        _save(self.path, {name: self.tensors[name]})

    def tensor(self, name: str, dtype: str, shape: str) -> None:
        _save(self.path, self.tensors | {name: torch.ones(json.loads(shape), dtype=getattr(torch, dtype))})

    def index(self, name: str, file: str) -> None:
        self.next_file = next(other for other in self.index_of.values() if other != self.index_of[name])
        _save_index(self.path, self.index_of | {name: file.replace("NEXT", self.next_file)})

    def index_is(self, text: str) -> None:
        self.file.unlink()
        (self.path / _INDEX).write_text(text)

    def cut(self, size: str) -> None:
        self.file.write_bytes(self.file.read_bytes()[: int(size)])

    def header(self, size: str, *words: str) -> None:
        text = " ".join(words).encode()
        self.file.write_bytes(struct.pack("<Q", len(text) if size == "own" else int(size)) + text + bytes(100))

    def empty(self) -> None:
        self.file.unlink()

    def pickle(self) -> None:
        (self.path / "pytorch_model.bin").write_bytes(b"")

    def not_found(self) -> None:
        self.kind = "NOT_FOUND"

    def says(self, words: str) -> None:
        self.words.append(words)


@cases(Path(__file__).with_name("weights.txt"))
def test_a_folder_that_is_refused(tmp_path: Path, case: Case) -> None:
    """What is missing, does not fit, lies outside of the folder or is torn is named."""
    Folder(tmp_path).run(case.lines)


def test_random_weights() -> None:
    """The same seed gives the same weights, another seed others; norms are 1 and every weight has its shape."""
    first, again, other = random_weights(_CONFIG, 1), random_weights(_CONFIG, 1), random_weights(_CONFIG, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[LM_HEAD], other[LM_HEAD])
    assert (first["model.norm.weight"] == 1).all()
    assert (60, 32) == first[LM_HEAD].shape
    assert ((4 + 2 + 2) * 6, 32) == first["model.layers.0.self_attn.qkv_proj.weight"].shape


def test_loading_undoes_splitting(tmp_path: Path) -> None:
    """Random weights that are split into the tensors of a folder come back from it as they were."""
    weights, tensors = random_weights(_CONFIG, 3), {}
    for name, parts in _CONFIG.weight_parts().items():
        pieces = weights[name].split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    _save(tmp_path, tensors)
    assert set(tensors) == set(load_file(tmp_path / _SINGLE))
    loaded = load_folder(tmp_path, _CONFIG)
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def _greedy(config: TransformerConfig, weights: _Tensors, first: int, num_tokens: int) -> list[int]:
    """What the model says after the token ``first``, always the most likely token."""
    model = TransformerModel(config, dict(weights))
    block_size = 16
    num_blocks = -(-num_tokens // block_size)
    kv = model.new_kv(1 + num_blocks, block_size)
    table = torch.arange(1, 1 + num_blocks, dtype=torch.int32).unsqueeze(0)
    text = [first]
    for position in range(num_tokens):
        hidden = model.forward(
            torch.tensor(text[-1:]),
            torch.tensor([position], dtype=torch.int32),
            kv,
            table,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([position + 1], dtype=torch.int32),
            torch.tensor([block_size + position]),
            1,
            position + 1,
        )
        text.append(int(model.logits(hidden).argmax()))
    return text[1:]


@pytest.mark.parametrize(("cycle_len", "corrupted"), [(0, 0.0), (5, 0.0), (0, 0.3)])
def test_permutation_model(cycle_len: int, corrupted: float) -> None:
    """The greedy text of a permutation model is its permutation, applied again and again."""
    weights = permutation_weights(_CONFIG, 4, cycle_len=cycle_len, corrupted=corrupted)
    successors = permutation(_CONFIG.vocab_size, 4, cycle_len=cycle_len, corrupted=corrupted)
    expected = [int(successors[17])]
    while len(expected) < 40:
        expected.append(int(successors[expected[-1]]))
    assert expected == _greedy(_CONFIG, weights, 17, 40)


def test_permutation_model_computes() -> None:
    """The layers of a permutation model are not idle: with larger factors on them the text is another one."""
    quiet = _greedy(_CONFIG, permutation_weights(_CONFIG, 4), 17, 40)
    assert quiet != _greedy(_CONFIG, permutation_weights(_CONFIG, 4, epsilon=1.0), 17, 40)


def test_permutation() -> None:
    """Cycles have the length asked for; corruption changes the part asked for and leaves a permutation."""
    successors = permutation(60, 1, cycle_len=6)
    walked = np.arange(60)
    for _ in range(5):
        walked = successors[walked]
        assert (walked != np.arange(60)).all()
    assert (successors[walked] == np.arange(60)).all()
    corrupted = permutation(60, 1, cycle_len=6, corrupted=0.25)
    assert 15 == (corrupted != successors).sum()
    assert list(range(60)) == sorted(corrupted)


def test_impossible_permutations() -> None:
    """A cycle that does not fit, a part that is none and tied embeddings are refused."""
    with pytest.raises(InvalidArgumentError, match="cycle_len must divide vocab_size = 60, got 7"):
        permutation(60, 0, cycle_len=7)
    with pytest.raises(InvalidArgumentError, match=r"corrupted must be from 0 to 1, got 1\.5"):
        permutation(60, 0, corrupted=1.5)
    with pytest.raises(InvalidArgumentError, match="tie_word_embeddings must be false"):
        permutation_weights(replace(_CONFIG, tie_word_embeddings=True), 0)


def test_model_needs_all_weights() -> None:
    """A model is not made of incomplete weights, nor for longer texts than it can do."""
    weights = random_weights(_CONFIG, 0)
    with pytest.raises(InvalidArgumentError, match="max_model_len must be from 0 to 64, got 65"):
        TransformerModel(_CONFIG, weights, max_model_len=65)
    del weights[LM_HEAD]
    with pytest.raises(InvalidArgumentError, match=r"1 of .* missing, first 'lm_head\.weight'"):
        TransformerModel(_CONFIG, weights)


def test_a_cache_larger_than_memory_is_refused():
    """A cache that the host cannot allocate is an error that says its size and what to lower."""
    model = TransformerModel(_CONFIG, dict(random_weights(_CONFIG, seed=1)))
    with pytest.raises(ResourceExhaustedError, match=r"a KV cache of 1099511627776 blocks takes \d+ bytes.*lower kv_c"):
        model.new_kv(2**40, 16)
