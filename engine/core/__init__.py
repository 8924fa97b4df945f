"""The core: one thread, no torch. It owns every sequence, every page number and the queue, and decides what each step computes."""
