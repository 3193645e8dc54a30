"""Llama 1 to 3, and what is published as such."""

from typing import ClassVar

from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout


class Llama(TransformerConfig):
    """The architecture that the others are described by."""

    architecture = "LlamaForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 2048}
    gguf = GgufLayout("llama", has_pairs=True)
