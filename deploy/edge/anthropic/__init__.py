"""Anthropic's Messages API: its requests and its answers."""
