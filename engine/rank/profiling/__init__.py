"""A rank's steps measured without core and replica: by batch and context, and stage by stage."""
