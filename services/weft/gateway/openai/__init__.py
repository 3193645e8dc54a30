"""OpenAI's interface: requests, responses, chat templates."""
