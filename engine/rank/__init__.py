"""The rank: one process a GPU. It decides nothing: its state follows from plans and sampled tokens."""
