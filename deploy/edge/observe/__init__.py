"""The record, access line and spans of a request."""
