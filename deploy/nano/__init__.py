"""Nano checkpoints: every Gemma 4 family member in miniature, built from a seed in the public Hugging Face layout."""
