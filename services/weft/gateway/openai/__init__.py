"""OpenAI's interface: its endpoints, a module each, and what they share."""

from weft.gateway.openai import chat, completions
from weft.gateway.openai.endpoint import Endpoint

#: What is served, and offered for batches.
ENDPOINTS: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
)
