"""Numbers that look random and depend on nothing but their arguments."""


def mixed(*values: int) -> int:
    """A number below 2**32 that depends on all values."""
    mix = 0x9E3779B97F4A7C15
    for value in values:
        mix = (mix ^ value) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mix ^= mix >> 29
    return mix >> 32


def chance(probability: float, *values: int) -> bool:
    """True with `probability`, always the same for the same values."""
    return mixed(*values) < probability * (1 << 32)
