"""OpenAI's files and batches: many requests in one file, answered in the background."""
