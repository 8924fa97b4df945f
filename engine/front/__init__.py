"""The replica's side: the core's client, tokenization, and replies."""
