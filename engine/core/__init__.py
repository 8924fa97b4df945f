"""The core: one thread without torch that owns all sequences and pages, and plans each step."""
