"""The core: one thread without torch that owns all sequences, pages and the queue, and plans each
step."""
