"""Models: flat files that read like the paper. Tensor parallelism is in `layers`."""
