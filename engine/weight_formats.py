"""The formats of stored matrices, by name: their tensors in a checkpoint and on a rank. No torch.

Each has an entry here, and a class derived from `engine.rank.weight.Weight`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple


class StoredTensor(NamedTuple):
    name: str  # of the rank's parameter
    suffix: str = ""  # after the matrix's name in a checkpoint
    block: tuple[int, int] = (1, 1)  # rows and columns of the matrix for an element; 0: all of them
    dtype: str | None = None  # on the rank; None: the model's
    saved: tuple[str, ...] = ("BF16", "F16", "F32")  # allowed dtypes in safetensors
    draw: Callable[[Any, int], Any] | None = None  # makes a random one from normal values of its shape, and n; None: as the matrix

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        return _in_blocks(matrix, self.block)


@cache
def _in_blocks(matrix: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    if block == (1, 1):
        return matrix
    sizes = zip(matrix[-2:], block, strict=False)
    return (*matrix[:-2], *(-(-size // unit) if unit else 1 for size, unit in sizes))


class WeightFormat(NamedTuple):
    weight: str  # `module:class` of a matrix on a rank
    tensors: tuple[StoredTensor, ...]  # on a rank and, unless it is packed at load, in a checkpoint
    schemes: tuple[str, ...] = ()  # of checkpoints with these tensors, as `engine.quantisation` names them
    unread: tuple[str, ...] = ()  # ignored tensors in a checkpoint, by name after the module's
    packer: str | None = None  # `module:function` that packs rows of a plain matrix, or None
    source: tuple[StoredTensor, ...] = ()  # tensors in a checkpoint, values first; empty: those of a rank
    reader: str | None = None  # `module:function` that makes a rank's tensors from whole rows, in whole blocks, of the source's
    is_static: bool = False  # the checkpoint has static activation scales
    eight_bits: "WeightFormat | None" = None  # of matrices that stay in eight bits (`engine.quantisation`)

    @property
    def saved(self) -> tuple[StoredTensor, ...]:
        return self.source or self.tensors

    @property
    def row_block(self) -> int:
        """Rows must come in multiples of this, except the last."""
        return max(tensor.block[0] for tensor in self.saved) or 1

    def packed_at_load(self) -> "WeightFormat":
        return self._replace(source=PLAIN.tensors, reader=self.packer)

    def drawn(self) -> "WeightFormat":
        """The format for a random checkpoint: a rank's own tensors, or a plain matrix."""
        if self.source == PLAIN.tensors:
            return self
        eight_bits = self.eight_bits and self.eight_bits.drawn()
        return self._replace(source=(), reader=None, eight_bits=eight_bits)


PLAIN = WeightFormat("engine.rank.weight:Weight", (StoredTensor("weight"),))
FP8 = WeightFormat(
    "engine.rank.fp8:Fp8Weight",
    (
        StoredTensor("values", dtype="float8_e4m3fn", saved=("F8_E4M3",), draw=lambda normal, _: (100 * normal).clamp(-448, 448)),
        StoredTensor("scale", "_scale", (1, 0), "float32", draw=lambda normal, n: 0 * normal + 1 / (100 * n**0.5)),
    ),
    ("compressed-tensors, 8-bit float channel weights, 8-bit float token dynamic activations",
     "modelopt, FP8_PER_CHANNEL_PER_TOKEN"),
    packer="engine.rank.fp8:pack",
)  # fmt: skip
_FP8_VALUES = StoredTensor("values", saved=("F8_E4M3",))
# One scale for a matrix. That of its activations is not needed: each row of them gets its own, which is at least as exact.
FP8_TENSOR = FP8._replace(
    source=(_FP8_VALUES, StoredTensor("scale", "_scale", (0, 0))),
    reader="engine.rank.fp8:from_tensor_scale",
    is_static=True,
    schemes=("compressed-tensors, 8-bit float tensor weights, 8-bit float tensor activations",
             "compressed-tensors, 8-bit float tensor weights, 8-bit float token dynamic activations",
             "compressed-tensors, 8-bit float tensor weights, 8-bit float tensor dynamic activations",
             "modelopt, FP8"),
)  # fmt: skip
# A scale for each block of 128 x 128. Ranks cut through such blocks, so the matrix is packed again, a scale a row.
FP8_BLOCKS = FP8._replace(
    source=(_FP8_VALUES, StoredTensor("scale", "_scale", (128, 128))),
    reader="engine.rank.fp8:from_block_scales",
    schemes=("compressed-tensors, 8-bit float block 128x128 weights, 8-bit float group of 128 dynamic activations",
             "modelopt, FP8_PB_WO",
             "fp8, 128x128 dynamic"),
)  # fmt: skip
_GROUP_SCALES = StoredTensor("scale", "_scale", (1, 16), saved=("F8_E4M3",))
# Four bits, a scale for each 16 columns and one for the matrix: a factor in ModelOpt, a divisor in compressed-tensors. They are
# packed again, too, unless `weights: nvfp4` keeps them.
NVFP4_MODELOPT = FP8._replace(
    source=(StoredTensor("values", "", (1, 2), saved=("U8",)), _GROUP_SCALES, StoredTensor("factor", "_scale_2", (0, 0))),
    reader="engine.rank.nvfp4:fp8_from_factor",
    schemes=("modelopt, NVFP4", "modelopt, W4A16_NVFP4"),
)
NVFP4 = FP8._replace(
    source=(
        StoredTensor("values", "_packed", (1, 2), saved=("U8",)), _GROUP_SCALES, StoredTensor("divisor", "_global_scale", (0, 0)),
    ),
    reader="engine.rank.nvfp4:fp8_from_divisor",
    schemes=("compressed-tensors, 4-bit float tensor_group of 16 weights",
             "compressed-tensors, 4-bit float tensor_group of 16 weights, 4-bit float tensor_group of 16 dynamic activations"),
)  # fmt: skip
_FOUR_BITS = WeightFormat(
    "engine.rank.nvfp4:Nvfp4Weight",
    (
        StoredTensor("values", "", (1, 2), "uint8", draw=lambda normal, n: _random_words(normal, n) % 256),
        StoredTensor("scale", "_scale", (1, 16), "float8_e4m3fn", draw=lambda normal, _: 0 * normal + 1),
        StoredTensor("factor", "_scale_2", (1, 0), "float32", draw=lambda normal, n: 0 * normal + 1 / (2.926 * n**0.5)),
    ),
)
NVFP4_GPUS = ((10, 0), (10, 3))
NVFP4_NEEDS = "GPUs of compute capability 10.0 or 10.3 with FlashInfer"
NVFP4_KEPT = tuple(
    _FOUR_BITS._replace(source=eight.source, reader=reader, schemes=eight.schemes, eight_bits=eight)
    for eight, reader in (
        (NVFP4_MODELOPT, "engine.rank.nvfp4:from_factor"),
        (NVFP4, "engine.rank.nvfp4:from_divisor"),
    )
)
INT8 = WeightFormat(
    "engine.rank.int8:Int8Weight",
    (
        StoredTensor("values", dtype="int8", saved=("I8",), draw=lambda normal, _: (30 * normal).round().clamp(-127, 127)),
        StoredTensor("scale", "_scale", (1, 0), "float32", draw=lambda normal, n: 0 * normal + 1 / (30 * n**0.5)),
    ),
    ("compressed-tensors, 8-bit int channel weights, 8-bit int token dynamic activations",),
)


def int4(group: int, *, symmetric: bool) -> WeightFormat:
    tensors: tuple[StoredTensor, ...] = (
        StoredTensor("values", "_packed", (1, 8), "int32", ("I32",), draw=_random_words),
        StoredTensor("scale", "_scale", (1, group), draw=lambda normal, n: 0 * normal + 1 / (4.6 * n**0.5)),
    )
    if not symmetric:
        tensors = (*tensors, StoredTensor("zero", "_zero_point", (8, group), "int32", ("I32",), draw=_random_words))
    numbers = f"4-bit int group of {group}" + " asymmetric" * (not symmetric)
    return WeightFormat(
        "engine.rank.int4:Int4Weight", tensors, (f"compressed-tensors, {numbers} weights",), unread=("weight_shape",)
    )


def _random_words(normal: Any, _: int) -> Any:
    return ((normal * (1 << 24)).long() * 2654435761 >> 16) % (1 << 32) - (1 << 31)


# By the name that `weights` has in a configuration.
FORMATS = {
    "plain": (PLAIN,),
    "fp8": (FP8, FP8_TENSOR, FP8_BLOCKS, NVFP4_MODELOPT, NVFP4),
    "nvfp4": (*NVFP4_KEPT, FP8, FP8_TENSOR, FP8_BLOCKS),  # mixed folders have fp8 matrices, too
    "int8": (INT8,),
    "int4": tuple(int4(group, symmetric=symmetric) for group in (32, 64, 128) for symmetric in (True, False)),
}
