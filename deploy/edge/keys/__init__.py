"""API keys: their file, holders, rights and quotas."""
