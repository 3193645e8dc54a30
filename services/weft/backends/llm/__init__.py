"""The backend ``llm``: language models behind the V2 protocol. Imports torch when the first model loads."""

from weft.backends.llm.backend import LlmBackend

__all__ = ["LlmBackend"]
