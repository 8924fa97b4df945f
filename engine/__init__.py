"""The engine: `front` runs in the replica, `core` decides, `rank` computes."""
