"""Models of the benchmarks: shapes, and random weights on one thread of the CPU."""

from typing import NamedTuple

import torch

from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import config_from_json
from weft.llm.models.weights import Weights, random_weights

#: Longest text, in tokens.
MAX_MODEL_LEN = 4096
#: Of 8 tokens: more than any case needs, so that none has to wait for memory.
_NUM_BLOCKS = 4096
WEIGHTS_SEED = 0
_HEAD_DIM = 32


class Shape(NamedTuple):
    """A Llama: its name and its four sizes. Heads are 32 wide, and four query heads share keys and values."""

    name: str
    hidden_size: int
    num_layers: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 64, 2, 128, 128),
        Shape("toy", 256, 4, 704, 2048),
        Shape("mid", 512, 8, 1408, 8192),
    )
}


class Model(NamedTuple):
    """A model that any number of engines can run, one after the other.

    Attributes:
        shape: Its sizes.
        config: As the engine wants it; no token ends a text.
        weights: Float32, by the names of ``weights.weight_parts``.
        network: Computes with them.
    """

    shape: Shape
    config: TransformerConfig
    weights: Weights
    network: TransformerModel

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights."""
        return sum(weight.numel() for weight in self.weights.values())

    def engine_config(self, **fields: object) -> EngineConfig:
        """A resolved configuration of an engine for it."""
        return EngineConfig(**{"max_model_len": MAX_MODEL_LEN, "num_blocks": _NUM_BLOCKS, **fields}).resolved(
            self.config
        )


def hugging_face_config(shape: Shape) -> dict[str, object]:
    """The fields of ``config.json``."""
    num_heads = shape.hidden_size // _HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(num_heads // 4, 1),
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "dtype": "float32",
    }


def make_model(name: str) -> Model:
    """The model of that name; torch computes with one thread from then on."""
    torch.set_num_threads(1)
    shape = SHAPES[name]
    config = config_from_json(hugging_face_config(shape))
    weights = random_weights(config, WEIGHTS_SEED)
    return Model(shape, config, weights, TransformerModel(config, dict(weights), max_model_len=MAX_MODEL_LEN))
