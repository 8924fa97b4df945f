"""The stages of a step: encode, forward, sample, draft, report."""
