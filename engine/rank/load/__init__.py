"""How a rank's shard is filled: from a checkpoint's safetensors, a slice at a time, or at random."""
