"""API keys: the file that lists them, who a request is from, what it may do, and how much."""
