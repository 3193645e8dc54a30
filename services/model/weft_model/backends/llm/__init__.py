"""``llm``: language models behind the V2 protocol. torch is imported by the first model that loads, not here."""

from weft_model.backends.llm.backend import LlmBackend

__all__ = ["LlmBackend"]
