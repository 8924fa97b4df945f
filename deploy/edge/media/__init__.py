"""Images, videos and sound of a prompt, decoded and resized in side processes."""
