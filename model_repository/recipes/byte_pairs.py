"""A byte-level byte-pair tokenizer: any text has ids, and its bytes come back from them.

Byte-pair encoding of words as sequences of bytes: Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"  # before every text and after it
END_ID = 0


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of ``vocab_size`` tokens, the 256 bytes and ``END`` among them.

    ``encode`` puts ``END`` before the text, as the model saw it in training, unless told to add no special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    return tokenizer
