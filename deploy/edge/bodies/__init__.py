"""JSON and forms, read within bounds."""
