"""Checks the kernels that write into other ranks' memory against plain torch.

Every rank draws the inputs of all. All ranks must run the same checks in the same order; otherwise they poll to their bound and
fail.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from kernels.choose import ArgmaxInbox, choose_best, local_best
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.launch import enabled
from kernels.linear import linear, linear_send
from kernels.selfcheck import Check, Outputs, RandomInputs, sampled_rows

_NORM = "kernels.fused_allreduce_norm"
_EPS = 1e-6
_ROWS = 3
_SHARE = 700  # ids of each rank
_INPUTS = 264  # columns of a product that is sent


def inbox_checks(peers: AllReduceInbox, inbox: ArgmaxInbox, n: int) -> Iterator[Check]:
    peers.begin()
    few = min(_ROWS, peers.rows, peers.sharded_rows - 1)
    yield Check(_NORM, "a fused norm over ranks", _allreduce_norms, (peers, few, n, 1))
    if peers.width >= 2 * n:
        yield Check(_NORM, "a fused norm of two parts over ranks", _allreduce_norms, (peers, few, n, 2))
    if peers.rows >= peers.sharded_rows:
        rows = min(peers.sharded_rows + 1, peers.rows)
        yield Check(_NORM, "a fused norm of rows that ranks share", _allreduce_norms, (peers, rows, n, 1))
    for rows in sorted({1, few}):
        yield Check("kernels.linear", f"a product of {rows} rows that is sent to the ranks", _sent_product, (peers, rows, n))
    yield Check("kernels.choose", "sampling over ranks", _choices, (inbox,))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, (part.float() for part in parts)).to(parts[0].dtype)


def _allreduce_norms(draw: RandomInputs, group: AllReduceInbox, rows: int, n: int, branches: int) -> Outputs:
    parts = draw.floats(group.size, rows, branches * n)
    parts[..., 5::31] = -0.0  # what an inbox takes for nothing
    own = slice(group.rank, None, group.size) if rows >= group.sharded_rows else slice(None)
    part, peers = (parts[group.rank].contiguous(), group) if enabled(parts) else (_sum(parts.unbind()), None)
    norms = Norms(draw.floats(n), draw.floats(n), (draw.floats(n), draw.floats(n)) if branches == 2 else None)
    h, x = fused_allreduce_norm(part, draw.floats(rows, n), norms, _EPS, draw.floats(1), peers=peers)
    if branches == 2:
        return h, x
    first, normed = fused_allreduce_norm(part, None, Norms(None, norms.next_norm), _EPS, scale=8.5, peers=peers)
    return h[own], x, first[own], normed


def _sent_product(draw: RandomInputs, group: AllReduceInbox, rows: int, n: int) -> Outputs:
    xs = draw.floats(group.size, rows, _INPUTS)
    weight = draw.floats(n, _INPUTS, scale=_INPUTS**-0.5)
    norms = Norms(draw.floats(n), draw.floats(n))
    residual = draw.floats(rows, n)
    if not enabled(xs):
        return fused_allreduce_norm(_sum([linear(x, weight) for x in xs]), residual, norms, _EPS)
    own = xs[group.rank].contiguous()
    sent = linear_send(own, weight, group)
    return fused_allreduce_norm(linear(own, weight) if sent is None else sent, residual, norms, _EPS, peers=group)


def _choices(draw: RandomInputs, group: ArgmaxInbox) -> Outputs:
    logits, batch = sampled_rows(draw, group.size * _SHARE)
    logits[3, -1] = torch.nan
    rows = min(4, group.rows)
    first = 0
    inbox = None
    if enabled(logits):
        first = group.rank * _SHARE
        inbox = group
        logits = logits[:, first : first + _SHARE]
    batch = replace(batch, slots=batch.slots[:rows], positions=batch.positions[:rows])
    results = draw.filled(9, rows, 2)
    choose_best(local_best(logits[:rows].contiguous(), batch, first, 2), batch, results, inbox)
    return results, batch.tokens
