"""The table of metrics, and the exporter that serves it."""
