"""Tokenizers of few tokens."""

from functools import cache

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
