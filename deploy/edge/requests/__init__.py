"""What any API can ask for."""
