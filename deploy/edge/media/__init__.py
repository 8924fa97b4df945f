"""Media of a prompt, decoded and resized in side processes."""
