"""OpenAI's HTTP interface: the table of endpoints, a module each."""

from weft.gateway.openai import chat, completions, embeddings, rerank, responses, tokenize
from weft.gateway.openai.endpoint import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    responses.ENDPOINT,
    completions.ENDPOINT,
    embeddings.ENDPOINT,
    *rerank.ENDPOINTS,
    tokenize.TOKENIZE,
    tokenize.DETOKENIZE,
)
