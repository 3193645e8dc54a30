"""Small files of models: a tokenizer of few tokens, and ONNX from its text form."""

from functools import cache
from pathlib import Path

import onnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@cache
def byte_level() -> Tokenizer:
    """Every byte of an emoji is a token of its own; ``</s>`` ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello world text more User"], trainer)
    return tokenizer


def write_onnx(path: Path, text: str) -> None:
    """Write the model that a text of ONNX's own syntax is, with operator set 20."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
