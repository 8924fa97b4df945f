"""Lookup in a vocabulary-parallel table.

    embed(ids) = table[id - first] where this rank holds the row, zero where it does not

Summed over ranks it is the whole table's row, exactly: one term is the row, the others are zero.
"""

from torch import Tensor


def embed(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """ids int64 [T], table [rows, n]: rows first .. first + rows - 1 of the vocabulary -> [T, n] in the table's dtype."""
    assert ids.dim() == 1, ids.shape
    assert table.dim() == 2, table.shape
    return _embed_reference(ids, table, first)


def _embed_reference(ids: Tensor, table: Tensor, first: int) -> Tensor:
    local = ids - first
    mine = (local >= 0) & (local < table.shape[0])
    return table[local.clamp(0, table.shape[0] - 1)].masked_fill(~mine[:, None], 0.0)
