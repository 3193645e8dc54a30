"""Models whose greedy text is known, a cycle of tokens, while they compute everything; and drafts that err at will."""

import numpy as np
import torch

from benchmarks.language_model.shapes import MAX_MODEL_LEN, SHAPES, WEIGHTS_SEED, Model, Shape, hugging_face_config
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import config_from_json
from weft.llm.models.weights import random_weights
from weft.llm.weights.parts import EMBEDDING, LM_HEAD

#: Tokens until the text repeats.
CYCLE_LEN = 16
#: Of the output of each layer: small, so that a token decides what follows it.
_EPSILON = 0.01
_DRAFT = ("draft", 128, 1, 256)


def successors(vocab_size: int, error_rate: float = 0.0) -> torch.Tensor:
    """The token after each token, int64 ``[vocab_size]``; a share of them is another than without errors."""
    rng = np.random.default_rng(WEIGHTS_SEED)
    cycles = rng.permutation(vocab_size).reshape(-1, CYCLE_LEN)
    following = np.empty(vocab_size, np.int64)
    following[cycles] = np.roll(cycles, -1, axis=1)
    wrong = rng.permutation(vocab_size)[: round(error_rate * vocab_size)]
    following[wrong] = np.roll(following[wrong], 1)
    return torch.from_numpy(following)


def permutation_model(shape: Shape, error_rate: float = 0.0) -> Model:
    """A model of the shape: the embedding has random unit rows, and the LM head has at each token its predecessor's."""
    config = config_from_json(hugging_face_config(shape))
    weights = random_weights(config, WEIGHTS_SEED)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(_EPSILON)
    embedding = weights[EMBEDDING]
    embedding.div_(embedding.norm(dim=-1, keepdim=True))
    weights[LM_HEAD][successors(shape.vocab_size, error_rate)] = embedding
    return Model(shape, config, weights, TransformerModel(config, dict(weights), max_model_len=MAX_MODEL_LEN))


def permutation_models(name: str, error_rate: float) -> tuple[Model, TransformerModel]:
    """The model of a shape, and a small draft model that errs at that share of the tokens."""
    shape = SHAPES[name]
    return permutation_model(shape), permutation_model(Shape(*_DRAFT, shape.vocab_size), error_rate).network


def known_text(vocab_size: int, num_tokens: int) -> np.ndarray:
    """What a model says, from one token of each cycle on."""
    following = successors(vocab_size).numpy()
    columns = [np.arange(0, vocab_size, 7)]
    for _ in range(num_tokens // len(columns[0])):
        columns.append(following[columns[-1]])
    return np.stack(columns, axis=1).reshape(-1)[:num_tokens]
