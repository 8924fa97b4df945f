"""The rank: one process a GPU. It decides nothing: its state follows from the plans and its sampled
tokens. README.md lists the modules."""
