"""``writer``: a small Llama and its tokenizer, trained here on Python's own documentation."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from tokenizers import Tokenizer

from recipes.byte_pairs import END, END_ID, train_tokenizer
from recipes.catalog import WRITER_DETOKENIZER, WRITER_FOLDER, WRITER_TOKENIZER
from recipes.corpus import python_documentation
from recipes.language_model import (
    CONTEXT,
    ROPE_THETA,
    SHAPE,
    Ids,
    Llama,
    nats_per_token,
    train,
    unigram_nats_per_token,
)
from recipes.recipe import Figures

_VOCAB_SIZE = 2048
# Each message on a line of its own, behind who said it; the model goes on after "assistant:".
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def build(repository: Path, stage: Path) -> Figures:
    """The model's folder is written as transformers reads it, and the tokenizer for the steps before and after it.

    Returns:
        How well it predicts held-out texts, beside a model that only knows how frequent each token is.

    Raises:
        ValueError: It predicts no better than that one.
    """
    corpus = python_documentation()
    tokenizer = train_tokenizer(corpus.training, vocab_size=_VOCAB_SIZE)
    training, held_out = (_ids(tokenizer, texts) for texts in corpus)
    model = Llama(vocab_size=_VOCAB_SIZE)
    train(model, training)
    _save(stage, model, tokenizer)

    nats = nats_per_token(model, held_out)
    unigram_nats = unigram_nats_per_token(training, held_out, vocab_size=_VOCAB_SIZE)
    if not nats < unigram_nats:
        raise ValueError(f"{nats:.3g} nats per held-out token; a model of frequencies alone needs {unigram_nats:.3g}")
    num_bytes = sum(len(text.encode()) for text in corpus.held_out)
    tokens_per_byte = len(held_out) / num_bytes
    return {
        "held-out perplexity": math.exp(nats),
        "unigram perplexity": math.exp(unigram_nats),
        "held-out bits per byte": nats / math.log(2) * tokens_per_byte,
        "unigram bits per byte": unigram_nats / math.log(2) * tokens_per_byte,
        "million parameters": sum(weight.numel() for weight in model.parameters()) / 1e6,
    }


def _ids(tokenizer: Tokenizer, texts: list[str]) -> Ids:
    """All texts one after another, each behind ``END``."""
    return np.concatenate([np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch_fast(texts)])


def _save(stage: Path, model: Llama, tokenizer: Tokenizer) -> None:
    folder = stage / WRITER_FOLDER
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB_SIZE,
        **SHAPE,
        **ends,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    for name, values in {"config": config, "generation_config": ends}.items():
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    for copy in (WRITER_TOKENIZER, WRITER_DETOKENIZER):
        shutil.copyfile(folder / "tokenizer.json", stage / copy)
