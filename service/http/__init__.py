"""The HTTP API, shaped like OpenAI's."""
