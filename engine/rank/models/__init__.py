"""Models in flat files. Tensor parallelism is in `layers`."""
