"""Numbers that look random and depend on nothing but their arguments."""

_BITS = (1 << 64) - 1


def mixed(*values: int) -> int:
    """A number below 2**32 that depends on all values."""
    mix = 0x9E3779B97F4A7C15
    for value in values:
        mix = _scrambled(mix ^ value)
    return mix >> 32


def _scrambled(number: int) -> int:
    """SplitMix64's last step: each bit of the number changes half of the result's bits."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _BITS
    return number ^ number >> 31


def chance(probability: float, *values: int) -> bool:
    """True with `probability`, always the same for the same values."""
    return mixed(*values) < probability * (1 << 32)


def draft_chance(mean: float, drafts: int) -> float:
    """The share of drafts that stand, of those whose predecessors do, by which a step of `drafts` gives `mean` tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**at for at in range(drafts + 1)) < mean else (low, middle)
    return low
