"""A group's life: what the node can do, spawn and handshake, health, end."""
