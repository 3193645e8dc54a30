"""OpenAI's HTTP interface: the table of endpoints, a module each."""

from weft.gateway.openai import chat, completions, embeddings, responses, tokenize
from weft.gateway.openai.endpoint import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    responses.ENDPOINT,
    completions.ENDPOINT,
    embeddings.ENDPOINT,
    tokenize.TOKENIZE,
    tokenize.DETOKENIZE,
)
