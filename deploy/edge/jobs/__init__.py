"""From an Ask to the engine's Job."""
