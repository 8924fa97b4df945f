"""What ranks write into each other's memory, each kernel once against plain torch: joints, products that send their parts, choices.

Every rank draws the inputs of all, so that each knows by itself what must come out. All ranks must run the same checks in the
same order: one that leaves a check out keeps the others polling to their bound, and they find what came of it wrong.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.choose import Ballot, choose_best, local_best
from kernels.joint import Norms, Peers, joint
from kernels.launch import plain_torch, record
from kernels.linear import linear, linear_send
from kernels.precompile import precompile
from kernels.sampling_batch import SlotParameters
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
    sampling_scores,
    written,
)

_EPS, _ROWS = 1e-6, 3
_SHARE = 700  # ids of each rank
_INPUTS = 264  # columns of a product that is sent


def inbox_checks(peers: Peers, ballot: Ballot, n: int) -> list[Check]:
    """Checks over inboxes that are in use by nobody: of rows of `n` elements, few ones and, where the inboxes hold so many, as many
    as are shared out."""
    peers.begin()
    few = min(_ROWS, peers.rows, peers.sharded - 1)

    def check(module: str, what: str, make: Callable[[Peers | None], Op]) -> Check:
        return Check(module, what, make(peers), _plain(make(None)))

    checks = [check("kernels.joint", "a joint over ranks", partial(_joints, peers, few, n, 1))]
    if peers.width >= 2 * n:
        checks.append(check("kernels.joint", "a joint of two parts over ranks", partial(_joints, peers, few, n, 2)))
    if peers.rows >= peers.sharded:
        rows = min(peers.sharded + 1, peers.rows)
        checks.append(check("kernels.joint", "a joint of rows that ranks share", partial(_joints, peers, rows, n, 1)))
    for rows in sorted({1, few}):
        what = f"a product of {rows} rows that is sent to the ranks"
        checks.append(check("kernels.linear", what, partial(_sent_product, peers, rows, n)))
    checks.append(Check("kernels.choose", "sampling over ranks", _choices(ballot), _choices_reference(ballot)))
    return checks


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
    """In plain torch alone."""

    def run(draw: RandomInputs) -> Outputs:
        with plain_torch("kernels.joint"), plain_torch("kernels.linear"):
            return op(draw)

    return run


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In rank order, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _norms(draw: RandomInputs, n: int, sides: int) -> Norms:
    return Norms(draw.floats(n), draw.floats(n), (draw.floats(n), draw.floats(n)) if sides == 2 else None)


def _joints(group: Peers, rows: int, n: int, sides: int, inboxes: Peers | None) -> Op:
    """A layer's joint and, of one part, a forward's first; without `inboxes` of the whole sum. Of rows that are shared out, h is
    this rank's own alone."""

    def run(draw: RandomInputs) -> Outputs:
        parts = draw.floats(group.size, rows, sides * n)
        parts[..., 5::31] = -0.0  # what an inbox takes for nothing
        own = slice(group.rank, None, group.size) if rows >= group.sharded else slice(None)
        part = _sum(list(parts)) if inboxes is None else parts[group.rank].contiguous()
        norms = _norms(draw, n, sides)
        h, x = joint(part, draw.floats(rows, n), norms, _EPS, draw.floats(1), peers=inboxes)
        assert x is not None
        if sides == 2:
            return h, x
        first, normed = joint(part, None, Norms(None, norms.following), _EPS, scale=8.5, peers=inboxes)
        assert normed is not None
        return h[own], x, first[own], normed

    return run


def _sent_product(group: Peers, rows: int, n: int, inboxes: Peers | None) -> Op:
    def run(draw: RandomInputs) -> Outputs:
        xs, weight = draw.floats(group.size, rows, _INPUTS), draw.floats(n, _INPUTS, scale=_INPUTS**-0.5)
        norms, residual = _norms(draw, n, 1), draw.floats(rows, n)
        if inboxes is None:
            h, x = joint(_sum([linear(x, weight) for x in xs]), residual, norms, _EPS)
        else:
            mine = xs[group.rank].contiguous()
            sent = linear_send(mine, weight, inboxes)
            h, x = joint(linear(mine, weight) if sent is None else sent, residual, norms, _EPS, peers=inboxes)
        assert x is not None
        return h, x

    return run


def _choices(ballot: Ballot) -> Op:
    """The last of the rows has a NaN among the last rank's logits."""

    def run(draw: RandomInputs) -> Outputs:
        logits, positions, parameters = _silenced(draw, ballot)
        rows, first = min(4, ballot.rows), ballot.rank * _SHARE
        batch = sampling_batch(draw, positions, parameters)
        results = draw.ints(*[9] * 8).view(4, 2)[:rows]
        best = local_best(logits[:rows, first : first + _SHARE].contiguous(), batch, first, 2)
        choose_best(best, batch, results, ballot)
        return results, batch.tokens

    return run


def _choices_reference(ballot: Ballot) -> Op:
    def run(draw: RandomInputs) -> Outputs:
        logits, positions, parameters = _silenced(draw, ballot)
        rows = min(4, ballot.rows)
        nan = logits.isnan().any(-1)
        chosen = sampling_scores(logits, positions, parameters).argmax(-1).masked_fill(nan, 0)[:rows].int()
        return torch.stack([chosen, nan[:rows].int()], dim=1), written(chosen, positions[:rows])

    return run


def _silenced(draw: RandomInputs, ballot: Ballot) -> tuple[Tensor, Tensor, SlotParameters]:
    logits, positions, parameters = sampled_rows(draw, ballot.size * _SHARE)
    logits[3, -1] = torch.nan
    return logits, positions, parameters
