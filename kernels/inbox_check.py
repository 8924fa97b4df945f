"""What ranks write into each other's memory, each kernel once against plain torch: fused norms, products that send, choices.

Every rank draws the inputs of all, so that each knows by itself what must come out. All ranks must run the same checks in the
same order: one that leaves a check out keeps the others polling to their bound, and they find what came of it wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.choose import ArgmaxInbox, choose_best, local_best
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.launch import plain_torch, record
from kernels.linear import linear, linear_send
from kernels.precompile import precompile
from kernels.selfcheck import (
    Check,
    Failure,
    Op,
    Outputs,
    RandomInputs,
    inputs,
    raised,
    sampled_rows,
    sampling_batch,
)

_NORM = "kernels.fused_allreduce_norm"
_EPS = 1e-6
_ROWS = 3
_SHARE = 700  # ids of each rank
_INPUTS = 264  # columns of a product that is sent


def inbox_checks(peers: AllReduceInbox, inbox: ArgmaxInbox, n: int) -> list[Check]:
    """Checks over inboxes that are in use by nobody: of rows of `n` elements, few ones and, where the inboxes hold so many, as many
    as are shared out."""
    peers.begin()
    few = min(_ROWS, peers.rows, peers.sharded - 1)

    def check(module: str, what: str, make: Callable[[AllReduceInbox | None], Op]) -> Check:
        return Check(module, what, make(peers), _plain(make(None)))

    checks = [check(_NORM, "a fused norm over ranks", partial(_allreduce_norms, peers, few, n, 1))]
    if peers.width >= 2 * n:
        checks.append(check(_NORM, "a fused norm of two parts over ranks", partial(_allreduce_norms, peers, few, n, 2)))
    if peers.rows >= peers.sharded:
        rows = min(peers.sharded + 1, peers.rows)
        checks.append(check(_NORM, "a fused norm of rows that ranks share", partial(_allreduce_norms, peers, rows, n, 1)))
    for rows in sorted({1, few}):
        what = f"a product of {rows} rows that is sent to the ranks"
        checks.append(check("kernels.linear", what, partial(_sent_product, peers, rows, n)))
    return [*checks, Check("kernels.choose", "sampling over ranks", _choices(inbox, inbox), _plain(_choices(inbox, None)))]


def uncompiled(checks: Sequence[Check], device: torch.device, dtype: torch.dtype) -> list[Failure]:
    """On a GPU, compiles what the checks launch, and launches nothing: those that cannot be compiled. Without it, a rank that
    compiles would keep those that need not polling."""
    if device.type != "cuda":
        return []
    target = torch.cuda.get_device_capability(device)
    failed = []
    for check in checks:
        try:
            with record(target) as nodes:
                check.run(inputs(device, dtype))
            for node in nodes:
                precompile(node, target)
        except (TritonError, RuntimeError, ValueError) as error:
            failed.append(raised(check, error))
    return failed


def _plain(op: Op) -> Op:

    def run(draw: RandomInputs) -> Outputs:
        with plain_torch(_NORM), plain_torch("kernels.linear"), plain_torch("kernels.choose"):
            return op(draw)

    return run


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In rank order, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _norms(draw: RandomInputs, n: int, branches: int) -> Norms:
    return Norms(draw.floats(n), draw.floats(n), (draw.floats(n), draw.floats(n)) if branches == 2 else None)


def _allreduce_norms(group: AllReduceInbox, rows: int, n: int, branches: int, inboxes: AllReduceInbox | None) -> Op:
    """A layer's fused norm and, of one part, a forward's first; without `inboxes` of the whole sum. Of rows that are shared out, h
    is this rank's own alone."""

    def run(draw: RandomInputs) -> Outputs:
        parts = draw.floats(group.size, rows, branches * n)
        parts[..., 5::31] = -0.0  # what an inbox takes for nothing
        own = slice(group.rank, None, group.size) if rows >= group.sharded else slice(None)
        part = _sum(list(parts)) if inboxes is None else parts[group.rank].contiguous()
        norms = _norms(draw, n, branches)
        h, x = fused_allreduce_norm(part, draw.floats(rows, n), norms, _EPS, draw.floats(1), peers=inboxes)
        assert x is not None
        if branches == 2:
            return h, x
        first, normed = fused_allreduce_norm(part, None, Norms(None, norms.next_norm), _EPS, scale=8.5, peers=inboxes)
        assert normed is not None
        return h[own], x, first[own], normed

    return run


def _sent_product(group: AllReduceInbox, rows: int, n: int, inboxes: AllReduceInbox | None) -> Op:
    def run(draw: RandomInputs) -> Outputs:
        xs, weight = draw.floats(group.size, rows, _INPUTS), draw.floats(n, _INPUTS, scale=_INPUTS**-0.5)
        norms, residual = _norms(draw, n, 1), draw.floats(rows, n)
        if inboxes is None:
            h, x = fused_allreduce_norm(_sum([linear(x, weight) for x in xs]), residual, norms, _EPS)
        else:
            own = xs[group.rank].contiguous()
            sent = linear_send(own, weight, inboxes)
            h, x = fused_allreduce_norm(linear(own, weight) if sent is None else sent, residual, norms, _EPS, peers=inboxes)
        assert x is not None
        return h, x

    return run


def _choices(group: ArgmaxInbox, inbox: ArgmaxInbox | None) -> Op:
    """The last of the rows has a NaN among the last rank's logits. Without `inbox`, of the whole vocabulary."""

    def run(draw: RandomInputs) -> Outputs:
        logits, positions, parameters = sampled_rows(draw, group.size * _SHARE)
        logits[3, -1] = torch.nan
        rows, first = min(4, group.rows), 0 if inbox is None else group.rank * _SHARE
        batch = sampling_batch(draw, positions, parameters)
        batch = replace(batch, slots=batch.slots[:rows], positions=positions[:rows])
        own = logits[:rows] if inbox is None else logits[:rows, first : first + _SHARE]
        results = draw.ints(*[9] * 8).view(4, 2)[:rows]
        choose_best(local_best(own.contiguous(), batch, first, 2), batch, results, inbox)
        return results, batch.tokens

    return run
