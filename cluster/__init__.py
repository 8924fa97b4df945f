"""A group's life: node capability, spawn and handshake, health, end."""
