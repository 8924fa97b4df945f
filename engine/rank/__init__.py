"""The rank: one process a GPU. It decides nothing; its state is a fold over the plans and the tokens it sampled."""
