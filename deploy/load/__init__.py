"""The load generator: a client of any server that speaks OpenAI's API."""
