"""One op per file: its formula, a plain-torch reference, and a checked wrapper that the engine calls."""
