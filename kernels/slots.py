"""Apply a plan's deltas to device tables: flat writes and reads of (row, column) pairs.

    put    table[row_i, column_i] = value_i          pages into page tables, sampled tokens into token rows
    take   table[row_i, column_i]                    the input tokens of a step
    clear  table[row_i, :] = 0                       a new tenant's page table row

Pairs are distinct within a call, or the result would depend on the order in which a device writes.
"""

from torch import Tensor


def put(table: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """table [m, n], rows and columns int64 [k], values [k] of any integer dtype."""
    assert rows.shape == columns.shape == values.shape, (rows.shape, columns.shape, values.shape)
    _flat(table)[rows * table.shape[1] + columns] = values.to(table.dtype)


def take(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """table [m, n], rows and columns int64 [k] -> [k] in the table's dtype."""
    assert rows.shape == columns.shape, (rows.shape, columns.shape)
    return _flat(table)[rows * table.shape[1] + columns]


def clear(table: Tensor, rows: Tensor) -> None:
    """table [m, n], rows int64 [k]: those rows become 0."""
    table.index_fill_(0, rows, 0)


def _flat(table: Tensor) -> Tensor:
    assert table.dim() == 2, table.shape
    return table.view(-1)  # raises where the table is not contiguous
