"""Images, videos and sound of a prompt: how they come, are decoded and resized in side processes, and stand in the prompt."""
