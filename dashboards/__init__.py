"""What an operator sees: the table of metrics, and the exporter that serves it."""
