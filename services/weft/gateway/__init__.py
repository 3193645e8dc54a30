"""HTTP in front of the router: V2, and OpenAI's interface for models that generate text. See ``docs/gateway.md``."""
