"""OpenAI's interface: requests, responses and chat templates."""
