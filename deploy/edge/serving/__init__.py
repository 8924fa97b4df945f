"""One served model."""
