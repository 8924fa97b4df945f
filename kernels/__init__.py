"""Triton kernels of Gemma's layers and of a serving step.

One op per file: its formula, a plain-torch reference, and a checked wrapper, which uses torch where
no kernel applies. Read `launch` first, then `activation` and `linear`.
"""
