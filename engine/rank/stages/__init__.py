"""The stages of a step, in order: upload and forward, sample, report. `engine.rank.runner` runs them."""
