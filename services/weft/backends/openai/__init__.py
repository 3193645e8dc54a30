"""The backend ``openai``: models are calls of another server of OpenAI's protocol. See ``docs/engines.md``."""
