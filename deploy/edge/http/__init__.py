"""HTTP: scopes, errors, bounded writes."""
