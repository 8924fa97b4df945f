"""The Serve app, its launcher, the HTTP edge, models, and the CLI."""
