"""The HTTP server of a replica, as a plain ASGI app: it may be run by any server, and knows nothing of Ray."""
