"""The record of a request, its access line and its spans."""
