"""The stages of a step, in order: encode, forward, sample, draft, report. `engine.rank.runner` runs them."""
