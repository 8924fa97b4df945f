"""What is kept of a request: its record, its line in the access log, its spans."""
