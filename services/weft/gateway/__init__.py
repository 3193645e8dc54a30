"""The gateway: OpenAI's HTTP interface in front of the router."""
