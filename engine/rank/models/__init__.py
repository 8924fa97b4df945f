"""Models: flat files that read like the paper; what is tensor-parallel about them lies in `layers`."""
