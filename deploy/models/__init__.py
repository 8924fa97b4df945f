"""Resolves a model's name to a folder: local, hub, public shape, or nano model."""
