"""Folders of small encoders with random weights, and what transformers computes from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

#: Words of the tokenizer, behind its special tokens.
WORDS = [f"w{index}" for index in range(120)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 300,
}


def save_encoder(folder: Path, architecture: str, **fields: Any) -> Any:
    """Save a model of this class of transformers, whose configuration has these fields, and return it."""
    made = getattr(transformers, architecture)
    tokens = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(len(architecture))
    model = made(made.config_class(**_SIZES | tokens | fields)).eval()
    for name, weight in model.named_parameters():
        is_gain = "norm" in name.lower() and name.endswith("weight")
        torch.nn.init.normal_(weight, float(is_gain), 0.2 if weight.dim() == 1 else weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of ``WORDS`` that puts texts and pairs between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def changed_config(folder: Path, **fields: Any) -> None:
    """Change fields of the folder's ``config.json``."""
    path = folder / "config.json"
    write_json(path, json.loads(path.read_text()) | fields)


def reference(model: Any, ids: Sequence[int], type_ids: Sequence[int], *, is_hidden: bool) -> torch.Tensor:
    """The last hidden states ``[tokens, width]`` or the logits of one text, by transformers."""
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if "ModernBert" not in type(model).__name__:
        given["token_type_ids"] = torch.tensor([type_ids])
    with torch.no_grad():
        result = model.base_model(**given).last_hidden_state[0] if is_hidden else model(**given).logits[0]
    return torch.as_tensor(result)
