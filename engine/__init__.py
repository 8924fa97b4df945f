"""The engine: `front` runs in the replica, `core` decides, `rank` computes; the leaf modules here are what they share."""
