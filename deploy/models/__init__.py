"""From a model's name to a folder: local, of the hub, a public shape, or one of the embedded nano models."""
