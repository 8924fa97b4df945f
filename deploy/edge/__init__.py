"""The HTTP edge of a replica: a plain ASGI app without Ray."""
