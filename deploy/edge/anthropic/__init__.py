"""Anthropic's Messages API: what a request says, and what an answer looks like."""
