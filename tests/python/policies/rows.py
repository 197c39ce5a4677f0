"""Keys and values in 8 or 4 bits, as kernels/row.h says, from the formula alone.

Rotation and rounding are in float32, in the stated order, so that no tie is decided otherwise; what was stored is rotated
back in float64, by the matrix itself.
"""

import numpy as np

LEVELS = np.array([6, 18, 31, 44, 58, 75, 96, 127])
LEVELS = np.concatenate([-LEVELS[::-1], LEVELS])
# The level nearest to each whole number from -127 to 127; ties: the greater.
NEAREST = LEVELS[15 - np.argmin(np.abs(np.arange(-127, 128)[:, None] - LEVELS[::-1]), axis=-1)].astype(np.float32)


def block_of(dim):
    return dim & -dim


def hadamard(dim):
    """The orthogonal matrix: blocks of Sylvester's order, over the square root of their size."""
    block, one = block_of(dim), np.ones((1, 1))
    while len(one) < block:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(dim // block), one / np.sqrt(block))


def rotate(x):
    """By sums and differences of numbers 1, 2, 4, ... apart, then one multiplication."""
    x, dim = np.array(x, np.float32), x.shape[-1]
    half = 1
    while half < block_of(dim):
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return x * (np.float32(1) / np.sqrt(np.float32(block_of(dim))))


def bf16(x, up=False):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + (0xFFFF if up else 0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def whole(x, factor):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.nan_to_num(np.rint(x / factor[..., None])), -127, 127)


def round_q8(x):
    x = rotate(x)
    factor = bf16(np.abs(x).max(axis=-1, initial=0) / np.float32(127), up=True)
    return (whole(x, factor).astype(np.float64) * factor[..., None]) @ hadamard(x.shape[-1])


def running(a, b):
    """Products, in sixteen running sums over i mod 16, added from the first to the last."""
    products = a * b
    sums, total = np.zeros((*products.shape[:-1], 16), np.float32), np.zeros(products.shape[:-1], np.float32)
    for i in range(0, products.shape[-1], 16):
        part = products[..., i:i + 16]
        sums[..., :part.shape[-1]] += part
    for i in range(16):
        total = total + sums[..., i]
    return total


def nearest(x, factor):
    """The level nearest to the whole number nearest to x / factor; ties: the greater."""
    return NEAREST[whole(x, factor).astype(np.int64) + 127]


def round_q4(x):
    """Twice: the nearest levels, then the factor with the least squared error for them."""
    x = rotate(x)
    factor = np.sqrt(running(x, x) / np.float32(x.shape[-1])) / np.float32(46.476)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(2):
            levels = nearest(x, factor)
            factor = np.where(factor > 0, running(x, levels) / running(levels, levels), np.float32(0))
    return (levels.astype(np.float64) * bf16(factor)[..., None]) @ hadamard(x.shape[-1])
