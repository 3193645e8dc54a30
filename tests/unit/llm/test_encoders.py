"""Encoders against transformers, and against the arithmetic of sentence-transformers, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.encoders import changed_config, reference, save_encoder, write_json

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.encoders.folder import read_encoder
from weft.llm.encoders.model import EncoderModel

MODERN = {"local_attention": 16, "max_position_embeddings": 700}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", {}),
    "BERT of masked words": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "BERT, one score": ("BertForSequenceClassification", {"num_labels": 1}),
    "RoBERTa": ("RobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    "RoBERTa, three scores": ("RobertaForSequenceClassification", {"num_labels": 3, "hidden_act": "relu"}),
    "XLM-RoBERTa, one score": ("XLMRobertaForSequenceClassification", {"num_labels": 1, "pad_token_id": 1}),
    "CamemBERT": ("CamembertModel", {"pad_token_id": 1}),
    "ModernBERT": ("ModernBertModel", MODERN),
    "ModernBERT with every bias": (
        "ModernBertForMaskedLM",
        MODERN | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"},
    ),
    "ModernBERT with stretched positions": (
        "ModernBertModel",
        MODERN | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}}},
    ),
    "ModernBERT, one score": (
        "ModernBertForSequenceClassification",
        MODERN | {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "ModernBERT, scores of the first token": ("ModernBertForSequenceClassification", MODERN | {"num_labels": 2}),
}


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> EncoderModel:
    return EncoderModel(read_encoder(folder), dtype, torch.device(device), max_tokens=400, **options)


def texts(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of texts of several lengths, the padding token among them, and their types."""
    random, config = np.random.default_rng(0), model.config
    longest = 600 if config.model_type == "modernbert" else 280
    ids = [random.integers(0, config.vocab_size, size).tolist() for size in (1, 9, 3, 40, 9, 41, longest, 17)]
    two = getattr(config, "type_vocab_size", 1) > 1 and config.model_type == "bert"
    return ids, [[int(two and place > len(one) // 2) for place in range(len(one))] for one in ids]


def run(model: EncoderModel, ids: list[list[int]], types: list[list[int]]) -> npt.NDArray[np.float32]:
    return model.run(ids, types, lambda _row: True)


def expected(model: Any, ids: list[list[int]], types: list[list[int]]) -> npt.NDArray[np.float32]:
    """Vectors of length 1 of the mean, or scores as a cross-encoder gives them."""
    has_scores = "Classification" in type(model).__name__
    rows = []
    for one, kinds in zip(ids, types, strict=True):
        found = reference(model, one, kinds, is_hidden=not has_scores)
        if not has_scores:
            found = torch.nn.functional.normalize(found.mean(0), dim=0)
        rows.append(found.sigmoid() if has_scores and len(found) == 1 else found)
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(("architecture", "fields"), CASES.values(), ids=CASES)
def test_numbers_are_those_of_transformers(tmp_path: Path, architecture: str, fields: dict[str, Any]) -> None:
    """Of texts of any lengths at once; each is as if it were alone."""
    model = save_encoder(tmp_path, architecture, **fields)
    own, (ids, types) = load(tmp_path), texts(model)
    together = run(own, ids, types)
    assert together.std(0).min() > 1e-3
    np.testing.assert_allclose(together, expected(model, ids, types), atol=1e-4)
    alone = np.concatenate([run(own, [one], [kinds]) for one, kinds in zip(ids, types, strict=True)])
    np.testing.assert_allclose(together, alone, atol=2e-6)


@pytest.mark.parametrize(("dtype", "num_bits", "least"), [(torch.bfloat16, 0, 0.999), (torch.float32, 8, 0.99)])
def test_fewer_bits_change_little(tmp_path: Path, dtype: torch.dtype, num_bits: int, least: float) -> None:
    """Vectors keep their direction."""
    model = save_encoder(tmp_path, "BertModel")
    ids, types = texts(model)
    found = run(load(tmp_path, dtype=dtype, num_bits=num_bits), ids, types)
    assert (found * expected(model, ids, types)).sum(1).min() > least


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("architecture", "fields"), CASES.values(), ids=CASES)
def test_numbers_on_a_gpu(tmp_path: Path, architecture: str, fields: dict[str, Any]) -> None:
    """Are those of transformers on a CPU, and with 16 bits near them."""
    model = save_encoder(tmp_path, architecture, **fields)
    ids, types = texts(model)
    wanted = expected(model, ids, types)
    np.testing.assert_allclose(run(load(tmp_path, "cuda"), ids, types), wanted, atol=1e-3)
    half = run(load(tmp_path, "cuda", torch.bfloat16), ids, types)
    np.testing.assert_allclose(half, wanted, atol=0.05 * float(np.abs(wanted).max()) + 0.02)


def test_rows_that_nobody_waits_for_are_not_computed(tmp_path: Path) -> None:
    """They are zeros, and the others as ever; whether one is wanted is asked right before it is computed."""
    model = load((save_encoder(tmp_path, "BertModel"), tmp_path)[1])
    asked: list[int] = []
    found = model.run([[5] * 300, [6, 7]], [[0] * 300, [0, 0]], lambda row: asked.append(row) or row == 1)
    assert [1, 0] == asked
    assert not found[0].any()
    np.testing.assert_allclose(run(model, [[6, 7]], [[0, 0]])[0], found[1], atol=2e-6)


def test_older_names_are_read(tmp_path: Path) -> None:
    """Gains and offsets of norms as TensorFlow had them; a base model's weights without its prefix; two thetas."""
    model = save_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    ids, types = texts(model)
    before = run(load(tmp_path), ids, types)
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta", "bert.": ""}
    for new, name in old.items():
        weights = {key.replace(new, name): weight for key, weight in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(before, run(load(tmp_path), ids, types))
    folder = tmp_path / "modern"
    model = save_encoder(folder, "ModernBertModel", **MODERN)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    write_json(folder / "config.json", config | {"global_rope_theta": 160000.0, "local_rope_theta": 10000})
    ids, types = texts(model)
    np.testing.assert_allclose(run(load(folder), ids, types), expected(model, ids, types), atol=1e-4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute, got"),
    ("BertModel", {"is_decoder": True}, "is_decoder must be false, got True"),
    ("BertModel", {"add_cross_attention": True}, "add_cross_attention must be absent"),
    ("BertModel", {"hidden_act": "swishy"}, "hidden_act must be one of gelu, gelu_new"),
    ("BertModel", {"hidden_act": ["gelu"]}, "hidden_act must be one of gelu, gelu_new"),
    ("BertModel", {"layer_norm_eps": "x"}, "layer_norm_eps must be a number above 0, got 'x'"),
    ("ModernBertModel", {"norm_eps": -1.0}, "norm_eps must be a number above 0, got -1.0"),
    ("ModernBertModel", {"rope_parameters": {"full_attention": 3}}, "rope_parameters must be"),
    ("ModernBertModel", {"layer_types": [[]] * 4}, "layer_types must be"),
    ("BertModel", {"embedding_scale": 2.0}, "embedding_scale must be absent: it changes what a model computes"),
    ("BertModel", {"num_hidden_layers": 3}, "'encoder.layer.3.attention.output.LayerNorm.bias', "),
    ("BertModel", {"num_hidden_layers": 5}, "'encoder.layer.4.attention.self.query.weight' is missing"),
    ("BertModel", {"hidden_size": 32}, "must have shape [124, 32], got [124, 64]"),
    ("BertModel", {"hidden_size": "x"}, "hidden_size must be a whole number above 0, got 'x'"),
    (
        "BertModel",
        {"num_attention_heads": 5},
        "such that hidden_size = 64 has even heads, got 5",
    ),
    ("BertModel", {"architectures": ["GPT2LMHeadModel"]}, "architectures must be a list with one name"),
    ("BertModel", {"architectures": None}, "architectures must be a list with one name"),
    ("BertModel", {"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
    (
        "BertForSequenceClassification",
        {"sbert_ce_default_activation_function": "x.Tanh"},
        "activation_fn must be one of Sigmoid, Identity",
    ),
    (
        "RobertaModel",
        {"max_position_embeddings": 1},
        "max_position_embeddings must be above 1, and at most 1048576, got 1",
    ),
    ("ModernBertModel", {"max_position_embeddings": 10**9}, "and at most 1048576, got 1000000000"),
    (
        "ModernBertModel",
        {"rope_scaling": {"rope_type": "yarn"}},
        "rope_scaling must be absent, got",
    ),
    ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types must be"),
    (
        "ModernBertModel",
        {"rope_parameters": {"full_attention": {"rope_type": "x"}}},
        ".rope_type must be one",
    ),
    (
        "ModernBertForSequenceClassification",
        {"classifier_pooling": "max"},
        "pooling must be one of cls, mean",
    ),
]


@pytest.mark.parametrize(("architecture", "fields", "words"), REFUSED, ids=str)
def test_what_is_not_computed_is_refused(tmp_path: Path, architecture: str, fields: dict[str, Any], words: str) -> None:
    """By the name of the field or the weight."""
    save_encoder(tmp_path, architecture)
    changed_config(tmp_path, **fields)
    with pytest.raises(InvalidArgumentError) as caught:
        load(tmp_path)
    assert words in caught.value.message


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    """The files of sentence-transformers around a model in ``folder``."""
    kinds = ["Transformer", "Pooling", *more]
    modules = [{"type": f"st.models.{kind}", "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling/config.json", pooling)


@pytest.mark.parametrize(("pooling", "mode"), [
    ("mean", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
    ("cls", {"pooling_mode_cls_token": True, "word_embedding_dimension": 64}),
    ("max", {"pooling_mode_max_tokens": True, "include_prompt": True}),
    ("last", {"pooling_mode": "lasttoken"}),
])  # fmt: skip
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, pooling: str, mode: dict[str, Any]) -> None:
    """Pooled, projected with tanh and of length 1, as its modules do."""
    model = save_encoder(tmp_path, "BertModel")
    write_modules(tmp_path, mode, "Dense", "Normalize")
    dense = torch.nn.Linear(64, 24)
    write_json(tmp_path / "2_Dense/config.json", {"in_features": 64, "out_features": 24, "bias": True})
    tensors = {f"linear.{name}": weight.data for name, weight in dense.named_parameters()}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    ids, types = texts(model)
    rows = []
    for one, kinds in zip(ids, types, strict=True):
        hidden = reference(model, one, kinds, is_hidden=True)
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "last": hidden[-1]}[pooling]
        rows.append(torch.nn.functional.normalize(dense(pooled).tanh(), dim=0).detach())
    folder = read_encoder(tmp_path)
    assert (24, True) == (folder.width, folder.normalizes)
    np.testing.assert_allclose(run(load(tmp_path), ids, types), torch.stack(rows), atol=1e-4)
    write_modules(tmp_path, mode)
    lengths = np.linalg.norm(run(load(tmp_path), ids, types), axis=1)
    assert (abs(lengths - 1) > 0.1).all()


MEAN = {"pooling_mode_mean_tokens": True}
CLIP = [{"type": "st.CLIPModel", "path": ""}]
WEIGHTED = {"pooling_mode_weightedmean_tokens": True}
MODULES: list[tuple[str, Any, str]] = [
    ("modules.json", {"a": 1}, "modules.json must hold a JSON array, got dict"),
    ("modules.json", CLIP, "must begin with Transformer and Pooling, got ['CLIPModel']"),
    ("modules.json", [{"type": "Transformer", "path": "../x"}], "a folder here, got"),
    ("modules.json", [{"path": ""}], "each module needs a type"),
    ("1_Pooling/config.json", WEIGHTED, "must choose one of mean, cls, max, lasttoken"),
    ("1_Pooling/config.json", MEAN | {"pooling_mode_max_tokens": True}, "must choose one of"),
    ("1_Pooling/config.json", MEAN | {"include_prompt": False}, "and not exclude prompts, got"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.Softmax"}, "activation_function must be one of"),
    ("2_Dense/config.json", {"in_features": 64}, "out_features must be a whole number"),
    ("2_Dense/config.json", {"in_features": 32, "out_features": 2}, "in_features must be 64, got 32"),
]


@pytest.mark.parametrize(("name", "content", "words"), MODULES, ids=str)
def test_modules_that_are_not_computed_are_refused(tmp_path: Path, name: str, content: Any, words: str) -> None:
    """With the file and what is allowed."""
    write_modules(tmp_path, MEAN, "Dense")
    sizes = {"hidden_size": 64, "max_position_embeddings": 9}
    write_json(tmp_path / "config.json", sizes | {"architectures": ["BertModel"]})
    write_json(tmp_path / "2_Dense/config.json", {"in_features": 64, "out_features": 2})
    write_json(tmp_path / name, content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_encoder(tmp_path)
    assert words in caught.value.message


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """After the pooling too, and nothing comes after the normalisation."""
    write_json(tmp_path / "config.json", {"architectures": ["BertModel"], "max_position_embeddings": 9})
    for kinds in (["LSTM"], ["Normalize", "Dense"]):
        write_modules(tmp_path, MEAN, *kinds)
        with pytest.raises(InvalidArgumentError, match=f"or nothing may come, got .'{kinds[0]}'"):
            read_encoder(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """With what is looked for."""
    with pytest.raises(NotFoundError, match="give the folder of a Hugging Face model"):
        read_encoder(tmp_path)


def test_the_longest_text_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    """Its ``max_seq_length`` counts before the tokenizer's ``model_max_length``, and positions before both."""
    write_json(tmp_path / "config.json", {"architectures": ["BertModel"], "max_position_embeddings": 90})
    assert read_encoder(tmp_path).max_len == 90
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 30})
    assert read_encoder(tmp_path).max_len == 30
    for max_seq_length, expected in ((40, 40), (None, 30), (99, 90)):
        write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
        assert read_encoder(tmp_path).max_len == expected
