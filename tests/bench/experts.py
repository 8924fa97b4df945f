"""The experts' half of a layer of the 26B-A4B: `python -m tests.bench.experts [--tp 4] [--rows 1 8 32]`; JSON rows.

    router    scores and choice               experts   from the choice to the weighted sum of both branches

Tokens choose at random, so that `rows` tokens read 128 (1 - (1 - 8/128)^rows) experts on average. Two layers' weights in turn.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.experts import experts
from kernels.route import route, router_logits, router_parts
from tests.bench.timing import READ_RATE, Case, Made, precompile_all, try_case
from tests.nano.model_shapes import PUBLIC

SHAPE = PUBLIC["26b-a4b"]
ROWS = [1, 2, 4, 8, 16, 32, 64, 100, 256]
LAYERS = 2
EPS = 1e-6


@dataclass(frozen=True)
class ExpertsCase(Case):
    """One layer's experts on a rank of `tp`. Predicted: 1.15 times the floor, and 2 us a launch."""

    rows: int
    tp: int
    kernel: str = "experts"
    tile: str = "-"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"26b-tp{self.tp}-experts"

    @property
    def bytes(self) -> int:
        share = 1 - (1 - SHAPE.top_k / SHAPE.experts) ** self.rows
        return round(share * SHAPE.experts * 3 * SHAPE.moe_mlp // self.tp * SHAPE.hidden * 2)

    @property
    def predicted_us(self) -> float:
        return 1.15e6 * self.bytes / READ_RATE + (4 if self.rows <= 8 else 8)

    def make(self, device: torch.device) -> Made:
        n, m = SHAPE.hidden, SHAPE.moe_mlp // self.tp
        gate_up = torch.empty(LAYERS, SHAPE.experts, 2 * m, n, dtype=torch.bfloat16, device=device).normal_(std=n**-0.5)
        down = torch.empty(LAYERS, SHAPE.experts, n, m, dtype=torch.bfloat16, device=device).normal_(std=m**-0.5)
        x, beside = torch.empty(2, self.rows, n, dtype=torch.bfloat16, device=device).normal_().unbind()
        logits = torch.empty(LAYERS, self.rows, SHAPE.experts, device=device).normal_()
        choices = [route(layer, torch.ones(SHAPE.experts, device=device), SHAPE.top_k) for layer in logits]
        last: list[Tensor] = []

        def launch(i: int) -> None:
            at = i % LAYERS
            last[:] = [experts(x, *choices[at], gate_up[at], down[at], beside)]

        def error() -> float:
            """Of the first token, relative to its largest output."""
            (weights, chosen), want = choices[0], torch.zeros(n, device=device)
            for weight, e in zip(weights[0], chosen[0].tolist(), strict=True):
                g, u = (gate_up[0, e].float() @ x[0].float()).chunk(2)
                want += weight * (down[0, e].float() @ (functional.gelu(g, approximate="tanh") * u))
            return float((last[0][0, n:].float() - want).abs().max() / want.abs().max())

        return Made(launch, LAYERS, error)


@dataclass(frozen=True)
class RouterCase(Case):
    """One layer's router. Predicted: a microsecond and a half for each of three dependent reads."""

    rows: int
    kernel: str = "router"
    name: str = "26b-router"
    tile: str = "-"

    @property
    def bytes(self) -> int:
        return 6 * SHAPE.experts * SHAPE.hidden + 4 * self.rows * SHAPE.hidden

    @property
    def predicted_us(self) -> float:
        return 4.5 + 1e6 * self.bytes / READ_RATE

    def make(self, device: torch.device) -> Made:
        n, copies = SHAPE.hidden, 64
        h = torch.empty(self.rows, n, dtype=torch.bfloat16, device=device).normal_()
        proj = torch.empty(copies, SHAPE.experts, n, device=device).normal_(std=1.0)
        parts = torch.stack([router_parts(each, torch.ones(n, device=device)) for each in proj])
        norm = torch.ones(n, dtype=torch.bfloat16, device=device)
        ones = torch.ones(SHAPE.experts, device=device)
        last: list[Tensor] = []

        def launch(i: int) -> None:
            logits, _ = router_logits(h, parts[i % copies], norm, EPS)
            last[:] = [logits, *route(logits, ones, SHAPE.top_k)]

        def error() -> float:
            """Of the logits, absolute; infinite where the choice is not that of the logits."""
            z = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * n**-0.5
            right = torch.equal(last[2].long(), last[0].topk(SHAPE.top_k, dim=-1).indices)
            return float((last[0] - z @ proj[0].double().t()).abs().max()) if right else float("inf")

        return Made(launch, copies, error)


def cases(rows: list[int], tp: int) -> Iterator[Case]:
    for count in rows:
        yield RouterCase(count)
        yield ExpertsCase(count, tp)


def main() -> None:
    """One JSON row a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    target = (9, 0)
    precompile_all([node for case in cases(args.rows, args.tp) for node in case.nodes(target)], target, workers=8)
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        for case in cases(args.rows, args.tp):
            print(json.dumps(try_case(case, device)), flush=True)


if __name__ == "__main__":
    main()
