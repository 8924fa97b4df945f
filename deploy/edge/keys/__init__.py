"""API keys: the file that lists them, their holders, rights and quotas."""
