"""The replica's side: the core's client, prompts to token ids, token ids to text."""
