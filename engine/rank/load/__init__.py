"""Fills a rank's shard from safetensors, slice by slice, or at random."""
