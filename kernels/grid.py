"""Sizes of grids and blocks, for wrappers. Triton's functions of these names serve kernels too, and take ten times as long."""


def cdiv(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
