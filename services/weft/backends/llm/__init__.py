"""``llm``: language models behind the V2 protocol. torch is imported by the first model that loads, not here."""

from weft.backends.llm.backend import LlmBackend

__all__ = ["LlmBackend"]
