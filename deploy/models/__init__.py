"""Resolves a model's name to a folder."""
