"""The language-model engine: paged KV cache, continuous batching, prefix cache, one step at a time."""
