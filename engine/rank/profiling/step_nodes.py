"""The nodes of a decode step: what each is called, what it must read, and how their times add up.

    us        from the end of the node before to its own end: the nodes' sum is the step
    alone     how long its kernels run where none overlaps another
    floor     its bytes at the read rate: weights, K and V. Activations are not counted: at decode they stay in L2

Where kernels overlap, those that stream weights go on while latency-bound ones wait. What of the latter costs no time is the

    hidden share = 1 - (step - sum of the products alone) / (sum of the other nodes alone)
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from engine.geometry import Layer
from engine.rank.models.architecture import Model
from engine.rank.models.layers import AttentionModule, Experts, VocabTable
from engine.rank.profiling.bare_rank import BareRank
from engine.rank.profiling.scopes import Stretch

_BLOCK = re.compile(r"blocks\.(\d+)(?:\.(.*))?")


@dataclass(frozen=True)
class StepNode:
    """One node.

    name     the module that starts it, numbered where a module starts several
    layer    its index; None outside the layers
    kernels  kernels of ours by name, torch's operators as `torch.<name>`
    weights  bytes of weights that it reads: a product if there are any;  keys: bytes of K and V
    start_us, end_us  of its kernels, from the step's start;  us, alone_us  as in the module's docstring
    """

    name: str
    layer: int | None
    kernels: tuple[str, ...]
    weights: int = 0
    keys: int = 0
    start_us: float = 0.0
    end_us: float = 0.0
    us: float = 0.0
    alone_us: float = 0.0

    @property
    def bytes(self) -> int:
        """What must be read."""
        return self.weights + self.keys


@dataclass(frozen=True)
class StepProfile:
    """step_ms: end to end, without a profiler. overlapped: kernels ran as in a captured step, those of `alone_us` did not."""

    batch: int
    context: int
    read_rate: float
    step_ms: float
    overlapped: bool
    layers: tuple[Layer, ...]
    nodes: tuple[StepNode, ...]

    @property
    def hidden_share(self) -> float | None:
        """Of the nodes that are no products; None where nothing overlaps."""
        others = sum(node.alone_us for node in self.nodes if not node.weights)
        products = sum(node.alone_us for node in self.nodes if node.weights)
        return 1 - (1e3 * self.step_ms - products) / others if self.overlapped and others else None

    def floor_us(self, node: StepNode) -> float:
        """Microseconds of a node's bytes."""
        return 1e6 * node.bytes / self.read_rate

    def folded(self) -> list[tuple[int, StepNode]]:
        """(count, node) of the nodes that layers of one kind have alike, in order of their first; bytes and times are sums."""
        sums: dict[tuple[str, tuple[str, ...]], tuple[int, StepNode]] = {}
        for node in self.nodes:
            name = node.name if node.layer is None else f"{self.layers[node.layer].kind} {node.name}"
            count, total = sums.get((name, node.kernels), (0, StepNode(name, node.layer, node.kernels)))
            sums[name, node.kernels] = (count + 1, _added(total, node))
        return list(sums.values())


def _added(total: StepNode, node: StepNode) -> StepNode:
    """The first node's place, both nodes' bytes and times."""
    sums = {name: getattr(total, name) + getattr(node, name) for name in ("weights", "keys", "us", "alone_us")}
    return replace(total, **sums)


def nodes_of(rank: BareRank, stretches: Sequence[Stretch], batch: int, context: int) -> dict[int, StepNode]:
    """The node of each stretch, by index, in which something is started; no times yet."""
    weights = dict(_weights(rank.model, {stretch.scope for stretch in stretches}, batch))
    keys = dict(_keys(rank, batch, context))
    many = Counter(stretch.scope for stretch in stretches if stretch.operations)
    seen: Counter[str] = Counter()
    head = next((at for at, stretch in enumerate(stretches) if stretch.scope == "head"), len(stretches))
    first = next((at for at, stretch in enumerate(stretches) if stretch.scope), len(stretches))
    nodes = {}
    for at, stretch in enumerate(stretches):
        scope = stretch.scope
        if stretch.operations:
            seen[scope] += 1
            layer, name = _named(scope or ("inputs" if at < first else "sampling" if at > head else "between"))
            name += f" {seen[scope]}" if scope and many[scope] > 1 else ""
            read = (weights.pop(scope, 0), keys.pop(scope, 0))
            nodes[at] = StepNode(name, layer, tuple(stretch.operations), *read)
    return nodes


def _named(scope: str) -> tuple[int | None, str]:
    """blocks.3.attention.qkv -> (3, attention.qkv)."""
    found = _BLOCK.fullmatch(scope)
    return (int(found[1]), found[2] or "block") if found else (None, scope)


def _weights(model: Model, scopes: set[str], batch: int) -> Iterator[tuple[str, int]]:
    """(scope, bytes of the matrices that a step reads of it), those of the scopes inside it left out."""
    for name, module in model.named_modules():
        if name and name in scopes:
            inner = tuple(f"{scope}." for scope in scopes if scope.startswith(f"{name}."))
            size = sum(
                p.nbytes for part, p in module.named_parameters() if p.ndim > 1 and not f"{name}.{part}".startswith(inner)
            )
            yield name, _share(model, module, size, batch)
    yield "head", model.head.weight.nbytes


def _share(model: Model, module: nn.Module, size: int, batch: int) -> int:
    """What of a module's matrices `batch` rows read: of a table their rows, of experts as many as random choices hit."""
    if isinstance(module, VocabTable):
        return batch * size // module.weight.shape[0]
    moe = model.geometry.moe
    if moe is not None and isinstance(module, Experts):
        return int(size * (1 - (1 - moe.top_k / moe.experts) ** batch))
    return size


def _keys(rank: BareRank, batch: int, context: int) -> Iterator[tuple[str, int]]:
    """(scope of an attention, bytes of K and V that `batch` rows see)."""
    for name, module in rank.model.named_modules():
        if isinstance(module, AttentionModule):
            pool = rank.cache.of(module.layer)
            seen = min(context, pool.group.window or context)
            yield name, batch * 2 * pool.group.kv_heads * pool.group.head_dim * seen * pool.pool.element_size()
