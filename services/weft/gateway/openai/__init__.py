"""OpenAI's HTTP interface: the table of endpoints, a module each."""

from weft.gateway.openai import chat, completions, embeddings, rerank, tokenize
from weft.gateway.openai.endpoint import Endpoint

#: What is served, and offered for batches.
ENDPOINTS: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    embeddings.ENDPOINT,
    *rerank.ENDPOINTS,
    tokenize.TOKENIZE,
    tokenize.DETOKENIZE,
)
