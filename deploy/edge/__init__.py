"""The HTTP server of a replica: a plain ASGI app that knows nothing of Ray."""
