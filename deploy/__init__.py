"""The Serve app and its launcher; under them the HTTP edge, models, and the CLI."""
