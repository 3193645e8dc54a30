"""The language-model engine: paged KV cache, continuous batching, prefix caching, speculation."""
