"""Llama 1 to 3, and models published as Llama."""

from typing import ClassVar

from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout


class Llama(TransformerConfig):
    """Configuration of Llama, the base case of ``TransformerConfig``."""

    architecture = "LlamaForCausalLM"
    defaults: ClassVar = {"max_position_embeddings": 2048}
    gguf = GgufLayout("llama", has_pairs=True)
