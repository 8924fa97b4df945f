"""What runs in the replica: the client of the core, prompts to token ids, and token ids to text."""
