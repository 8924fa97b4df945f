"""Every kernel compiled for the GPUs it is meant for: registers, shared memory, spills, and the order of its accesses to memory.

No GPU is needed: wrappers are called on meta tensors, what they would launch is compiled. A kernel joins by its check
(`kernels.selfcheck`), and by a row in `CONSTANT`: the arguments that may be read before `wait`, since nothing writes them while the
engine serves. `SUBJECTS` has each check, the table of tiles, kernels between ranks, and real shapes, but for those of
tests.engine.rank.test_nodes. This holds for each:

    it compiles, for sm_90 and sm_100, for the smaller shared memory of sm_80 and sm_120, and fits
    nothing spills, but for what `SPILLED` lists
    no path to its end passes no wait; before the wait it writes nothing and reads only constants
    page ids are 64-bit before anything is multiplied with them; inboxes are polled by volatile loads
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import triton
import triton.language as tl

from engine.rank.stages.sample_stage import LARGEST_SAMPLERS
from kernels.axial_rope import head_norm, norm_axial_rope
from kernels.choose import ArgmaxInbox, choose_best, local_best, parts_of
from kernels.decode import decode_splits
from kernels.filters import filtered_tokens, scaled_rows, write_tokens
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.launch import launch, trigger, wait
from kernels.linear import GEGLU, NONE, _run, linear, linear_send
from kernels.packed import E4M3, Load, PackedMatrix
from kernels.ragged_attention import ragged_attention
from kernels.recheck import recheck
from kernels.sampling_batch import SamplingBatch, SlotParameters
from kernels.selfcheck import CHECKS, RandomInputs
from kernels.sequence_parallel import SequenceParallel
from kernels.tiles import TABLES, GemmShape, Tile
from tests.bench.attention import LAYERS
from tests.support.attention import decode_node, ints, meta
from tests.support.compiled import Compiled, compile_node
from tests.support.engine.listed_steps import mixed, sampled, step
from tests.support.launches import Node, argument_types, record

pytestmark = pytest.mark.cpu

WAIT = "griddepcontrol.wait"
_ACCESS = re.compile(r"(?P<op>(?:ld|st|atom|red|prefetch)\.[\w.:]*global[\w.:]*|cp\.async\.c[ga][\w.:]*)(?P<rest>.*)")
_PARAMETER = re.compile(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]")
_REGISTER = re.compile(r"%[a-z]+\d+")
_BRANCH = re.compile(r"(?P<condition>@!?%p\d+\s+)?(?P<op>bra(?:\.uni)?|ret|exit|trap)\b\s*(?P<label>[$\w]*)")
_LABEL = re.compile(r"([$\w]+):")
_NARROW = re.compile(r"(mul\.lo|mad\.lo|shl)\.[bsu]32\b")


@dataclass(frozen=True)
class Access:
    """One access to global memory: its opcode, the arguments that its address comes from, and whether it stands before the wait."""

    op: str
    arguments: frozenset[str]
    early: bool

    @property
    def reads(self) -> bool:
        return self.op.startswith(("ld", "atom", "cp.async"))

    @property
    def writes(self) -> bool:
        return self.op.startswith(("st", "atom", "red"))


def accesses(ptx: str, names: Sequence[str]) -> list[Access]:
    """All accesses in the PTX's order; `names`: the arguments that are not compiled in. An asynchronous copy counts as a read."""
    return [access for _, access in _annotated(ptx, names) if access is not None]


def early_reads(ptx: str, names: Sequence[str]) -> set[str]:
    """The arguments from whose memory something is read before the kernel waits for its predecessors."""
    return set().union(*(access.arguments for access in accesses(ptx, names) if access.early and access.reads))


def ends_without_waiting(ptx: str) -> bool:
    """Whether a path from the kernel's entry to an end passes no wait."""
    blocks = _blocks(_lines(ptx))
    open_, seen = [next(iter(blocks))], set()
    while open_:
        label = open_.pop()
        if label in seen:
            continue
        seen.add(label)
        lines, successors = blocks[label]
        if any(WAIT in line for line in lines):
            continue
        if not successors:
            return True
        open_ += successors
    return False


def narrow_products(ptx: str, names: Sequence[str], argument: str) -> list[str]:
    """32-bit products and shifts of what was loaded from `argument`: an offset that must be 64-bit is made of it."""
    tainted = set()
    found = []
    for line, access in _annotated(ptx, names):
        registers = _REGISTER.findall(line)
        if access is not None and access.op.startswith("ld") and argument in access.arguments:
            tainted |= set(_REGISTER.findall(line.split("[")[0]))
        elif access is None and registers and set(registers[1:]) & tainted:
            if _NARROW.search(line):
                found.append(line)
            if registers[0].startswith("%r") and not registers[0].startswith("%rd"):
                tainted.add(registers[0])
    return found


def _annotated(ptx: str, names: Sequence[str]) -> Iterator[tuple[str, Access | None]]:
    """Each line, and what it accesses. Registers carry the arguments that they were computed from, in the order of the text."""
    sources = {}
    early = True
    for line in _lines(ptx):
        early = early and WAIT not in line
        if parameter := _PARAMETER.search(line):
            place = int(parameter[2])
            sources[parameter[1]] = frozenset(names[place : place + 1])
            yield line, None
        elif found := _ACCESS.search(line):
            yield line, Access(found["op"], _address(found["op"], found["rest"], sources), early)
        else:
            target, *given = _REGISTER.findall(line) or [""]
            sources[target] = frozenset().union(*(sources.get(register, frozenset()) for register in given))
            yield line, None


def _address(op: str, rest: str, sources: dict[str, frozenset[str]]) -> frozenset[str]:
    """The arguments behind an access's address: its first bracket, of an asynchronous copy its second."""
    brackets = re.findall(r"\[([^\]]*)\]", rest)
    address = brackets[1] if op.startswith("cp.async") else brackets[0]
    return frozenset().union(*(sources.get(register, frozenset()) for register in _REGISTER.findall(address)))


def _lines(ptx: str) -> list[str]:
    """The body's lines without comments and debug information."""
    body = ptx.split(".entry", 1)[1].split("{", 1)[1]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".reg", ".file"))]


def _blocks(lines: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Basic blocks by label, each with its lines and the labels that may follow; none: the kernel ends."""
    blocks = {"": ([], [])}
    label, open_ = "", True
    for line in lines:
        if found := _LABEL.match(line):
            if open_:
                blocks[label][1].append(found[1])
            label, open_ = found[1], True
            blocks[label] = ([], [])
            continue
        if not open_:  # behind a jump: a block that only falls through to
            label, open_ = f"{label}+", True
            blocks[label] = ([], [])
        blocks[label][0].append(line)
        if branch := _BRANCH.match(line):
            if branch["label"] and branch["op"].startswith("bra"):
                blocks[label][1].append(branch["label"])
            open_ = branch["condition"] is not None
            if open_:
                blocks[label][1].append(f"{label}+")
                label = f"{label}+"
                blocks[label] = ([], [])
    return blocks


Target = tuple[int, int]
HOPPER, BLACKWELL = (9, 0), (10, 0)
SHARED = {HOPPER: 232448, BLACKWELL: 232448, (8, 0): 166912, (12, 0): 101376}
ROWS = 8
HIDDEN = 5376
fp32, long = (partial(meta, dtype=dtype) for dtype in (torch.float32, torch.int64))

CONSTANT = {
    "_gemv": {"weight", "scale", "pointers"},
    "_gemv_words": {"weight", "scale", "zero", "pointers"},
    "_gemm": {"weight", "scale", "pointers"},
    "_allreduce_norm": {"post", "next_norm", "scalar", "pointers"},
    "_allreduce_norm_sharded": {"post", "next_norm", "scalar", "pointers"},
    "_norm_own": {"post", "next_norm", "scalar"},
    "_logits": {"parts", "norm"},
    "_rotary": {"frequencies"},
    "decode_kernel": {"q_norm", "k_norm", "scales"},
    "_post": {"q_norm", "k_norm", "scales"},
    "verify_kernel": {"positions", "page_ids", "width"},  # written before the kernel before it, `_post`
    "_per_layer": {"norm"},
    "_unpack": {"words", "scale", "zero"},
}
AFTER_WORD = {"begun", "x", "index"}  # read before the wait, but after a word that says that they are there (kernels.lora)
PAGE_IDS = {"decode_kernel": "page_ids", "verify_kernel": "page_ids", "_post": "table", "_extend": "table"}
# Bytes a thread, of sine and of what loops do not touch.
SPILLED = {"_rotary": 32, "_extend": 160, "decode_kernel": 40, "verify_kernel": 24, "_filter": 8, "_many_logits": 16, "_attend": 16,
           "_gemv": 24}


def recorded(launches: Callable[[], None]) -> Callable[[Target], list[Node]]:
    """Lists what `launches` would start on a target."""

    def nodes(target: Target) -> list[Node]:
        with record(target) as listed:
            launches()
        return listed

    return nodes


def check_nodes(module: str, target: Target) -> list[Node]:
    """What the checks of a module launch; GPUs before sm_89 have no fp8."""
    with record(target) as nodes:
        for check in CHECKS:
            if check.module == module:
                check.run(RandomInputs(torch.device("meta"), torch.bfloat16), *check.arguments)
    return [node for node in nodes if target >= (8, 9) or not any("fp8" in of for of in argument_types(node).values())]


def linear_nodes(target: Target) -> Iterator[Node]:
    """Each tile of the tables once, in the first shape that names it, and some again where no tile divides the sizes. GPUs before
    sm_89 have no fp8."""
    seen = {}
    for load, table in TABLES.items():
        for shape, tiles in table.items():
            for tile in tiles.values() if load != "fp8" or target >= (8, 9) else ():
                seen.setdefault((tile, shape.gated, load), shape)
    for (tile, gated, load), shape in seen.items():
        yield from product_nodes(tile, shape, target, load)
        if tile.rows in {1, 16} and target == HOPPER:
            yield from product_nodes(tile, GemmShape(1031, 1032 if load != "int4" else 1088, gated), target, load)


def product_nodes(tile: Tile, shape: GemmShape, target: Target, load: Load = "plain") -> list[Node]:
    """One product of as many rows as the tile takes; of fp8 without what packs its rows."""
    x, rows = meta(tile.rows, shape.n), shape.m * (1 + shape.gated)
    weight = PackedMatrix(meta(rows, shape.n))
    if load == "fp8":
        weight = PackedMatrix(meta(rows, shape.n, dtype=E4M3), meta(rows, dtype=torch.float32), load)
    elif load == "int4":
        weight = PackedMatrix(meta(rows, shape.n // 8, dtype=torch.int32), meta(rows, shape.n // 32), load)
    with record(target) as nodes:
        _run(tile, x, weight, meta(tile.rows, shape.m), GEGLU if shape.gated else NONE)
    return nodes[-1:]


@recorded
def nodes_between_ranks() -> None:
    """Of four: products that write their parts to the inboxes, fused norms one-shot, the first one, and sharded, waits and norms of
    own rows, and the choice of tokens."""
    n, bf16 = HIDDEN, torch.bfloat16
    memory = meta(AllReduceInbox.bytes(4, 64, n, bf16) // 2, dtype=torch.int16)
    peers, both = AllReduceInbox([memory] * 4, 2, 64, n, bf16), Norms(meta(n), meta(n))
    for rows in (1, 8):
        linear_send(meta(rows, 2048), meta(n, 2048), peers)
    for rows in (ROWS, 64):
        fused_allreduce_norm(meta(rows, n), meta(rows, n), both, 1e-6, meta(1), peers=peers)
    fused_allreduce_norm(meta(ROWS, n), None, Norms(None, meta(n)), 1e-6, scale=73.5, peers=peers)
    memories = [meta(SequenceParallel.bytes(4, 2048, n, bf16), dtype=torch.uint8) for _ in range(4)]
    others = SequenceParallel(memories, 1, range(2049), n, bf16, ints(2)).begin(2048)
    others.norm(others.cut(meta(2048, n)), meta(2048, n), both, 1e-6, meta(1))
    batch, inbox = sampling_batch(ROWS), ArgmaxInbox([ints(ArgmaxInbox.bytes(4, ROWS) // 4)] * 4, 2, ROWS, ints(2))
    choose_best(local_best(fp32(ROWS, 65536), batch, 65536, parts_of(65536, ROWS, 132)), batch, ints(ROWS, 2), inbox)


def sampling_batch(rows: int) -> SamplingBatch:
    """Of nine slots."""
    parameters = SlotParameters(long(9, 3), fp32(9, 3), ints(9, 1024))
    return SamplingBatch(ints(rows), ints(rows), parameters, ints(9, 2049), ints(5), 30.0)


@recorded
def filters_nodes() -> None:
    """Filtered rows of one rank of four, and its share of 30 rows."""
    batch = sampling_batch(30)
    filtered_tokens(scaled_rows(fp32(4, 8, 65536), batch, 1, 262144), batch, ints(30, 2))
    write_tokens(ints(32), batch, ints(30, 2))


@recorded
def vision_nodes() -> None:
    """Both towers' heads."""
    for heads, d in ((12, 64), (16, 72)):
        q, tables = meta(90, heads, d), fp32(90, d // 2)
        norm_axial_rope(q, meta(d), tables, tables, 1e-6)
        ragged_attention(q, q, head_norm(q, 1e-6), ints(3), 60)


@recorded
def head_nodes() -> None:
    """The best logits of both widths' heads once more."""
    for rows, hidden in ((ROWS, 2816), (32, HIDDEN), (64, HIDDEN)):
        recheck(fp32(rows, 262144), meta(rows, hidden), meta(262144, hidden))


def step_nodes(_: Target) -> list[Node]:
    """Chunks beside decode rows, many tokens for experts, and samplers of adjusted rows with drafts."""
    samplers = [node for name in LARGEST_SAMPLERS for node in sampled("31b", name, ROWS, 4)]
    return [*mixed(2041, 7), *step("26b-a4b", 100), *mixed(2041, 7, "26b-a4b"), *samplers]


SUBJECTS: dict[str, Callable[[Target], Iterable[Node]]] = {
    **{module: partial(check_nodes, module) for module in dict.fromkeys(check.module for check in CHECKS)},
    "products": linear_nodes,
    "between ranks": nodes_between_ranks,
    "filters": filters_nodes,
    "towers": vision_nodes,
    "heads": head_nodes,
    "steps": step_nodes,
}


@cache
def compiled(subject: str, target: Target) -> list[Compiled]:
    return [compile_node(node, target) for node in {node.variant: node for node in SUBJECTS[subject](target)}.values()]


def check_fits(kernel: Compiled, target: Target) -> None:
    what = (kernel.node.kernel, kernel.node.constexprs, kernel.registers, kernel.shared, kernel.stack)
    assert kernel.registers * 32 * kernel.node.constexprs["warps"] <= 65536, what
    assert kernel.shared <= SHARED[target], what
    assert kernel.stack <= SPILLED.get(kernel.node.kernel, 0), what


@pytest.mark.parametrize("subject", SUBJECTS)
def test_fits_and_does_not_spill(subject: str) -> None:
    """Machine code for each launch, within a block's registers and shared memory, without spills that nobody listed; the last
    launch of each kernel on the newer GPU too."""
    for kernel in compiled(subject, HOPPER):
        check_fits(kernel, HOPPER)
    for node in {node.kernel: node for node in SUBJECTS[subject](BLACKWELL)}.values():
        check_fits(compile_node(node, BLACKWELL), BLACKWELL)


@pytest.mark.parametrize("target", [(8, 0), (12, 0)], ids=str)
def test_smaller_shared_memory(target: Target) -> None:
    """The largest pipeline of the table, cut for a GPU with less shared memory, fits it; uncut it would not. So does attention."""
    largest = max(
        ((shape, tile) for shape, tiles in TABLES["plain"].items() for tile in tiles.values()),
        key=lambda pair: pair[1].shared_bytes(pair[0].gated),
    )
    shape, tile = largest
    assert tile.shared_bytes(shape.gated) > SHARED[12, 0]
    x, weight = meta(tile.rows, shape.n), meta(shape.m * (1 + shape.gated), shape.n)
    with record(target) as nodes:
        linear(x, weight, GEGLU) if shape.gated else linear(x, weight)
    for node in (*nodes, *check_nodes("kernels.decode", target), *check_nodes("kernels.prefill", target)):
        assert compile_node(node, target).shared <= SHARED[target], node


@pytest.mark.parametrize("subject", SUBJECTS)
def test_dependent_launch_is_safe(subject: str) -> None:
    """Before it waits for its predecessors a kernel writes nothing and reads only what is constant, and no path skips the wait."""
    for kernel in compiled(subject, HOPPER):
        name, arguments = kernel.node.kernel, list(argument_types(kernel.node))
        assert kernel.node.constexprs["PDL"], name
        assert not ends_without_waiting(kernel.ptx), name
        found = accesses(kernel.ptx, arguments)
        told = AFTER_WORD if name == "_gemm" and kernel.node.constexprs["RANK"] else set()
        assert early_reads(kernel.ptx, arguments) <= CONSTANT.get(name, set()) | told, name
        asked = next((at for at, access in enumerate(found) if "acquire" in access.op), len(found))
        assert not [access for access in found[:asked] if access.reads and access.arguments & (told - {"begun"})], name
        assert not [access for access in found if access.early and access.writes and access.arguments != {"begun"}], name
        assert any(access.writes and access.arguments for access in found), name
        assert any(access.reads and access.arguments for access in found), name
        if name == "_post":  # `verify_kernel` relies on it
            assert 0 < kernel.ptx.index("griddepcontrol.wait") < kernel.ptx.index("griddepcontrol.launch_dependents")
        if name in PAGE_IDS:
            assert not narrow_products(kernel.ptx, arguments, PAGE_IDS[name])


def test_inboxes_are_polled_by_the_clock() -> None:
    """What another rank writes is read by volatile loads alone. A kernel that polls looks at the time, and no other does: how long
    a number of polls takes depends on the GPU."""
    polling = 0
    for kernel in (*compiled("between ranks", HOPPER), *compiled("kernels.choose", HOPPER)):
        found = accesses(kernel.ptx, list(argument_types(kernel.node)))
        polls = [access.op for access in found if access.reads and access.arguments & {"inbox", "flags"}]
        assert all("volatile" in op for op in polls), polls
        assert ("%globaltimer" in kernel.ptx) == bool(polls), kernel.node.kernel
        polling += bool(polls)
    assert polling


def test_keys_are_fetched_ahead() -> None:
    """Where a CTA has a multiprocessor's memory to itself, or half, two turns are in flight, and the loop waits for the oldest
    one; at 100 rows with a window three CTAs share it, each with a turn of 64 keys, without one two. Dependents start
    behind the wait. Where V is K's raw product, a turn asks for V's rows once, and for the pairs of K's that rope turns."""
    turn = 32 * (512 + 2 * 64) * 2
    kept = {("31b-tp4-sliding", 64): 2 * 2 * 32 * 256 * 2, ("31b-tp4-full", 16): 2 * turn}
    for (name, rows), least in kept.items():
        kernel = decode(name, rows)
        assert kernel.shared >= least, kernel.shared
        dependency = [line.split(";")[0] for line in kernel.ptx_memory if line.startswith("griddepcontrol")]
        assert dependency == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
        assert any(re.search(r"cp\.async\.cg", line) for line in kernel.ptx_memory)
        assert re.search(r"cp\.async\.wait_group\s+(0x)?[2-9]", kernel.ptx)
    kernel = decode("31b-tp4-sliding", 100)
    assert kernel.node.constexprs["KEYS"] == 64
    assert 2 * 64 * 256 * 2 <= kernel.shared <= SHARED[HOPPER] // 3
    kernel = decode("31b-tp4-full", 100)
    assert 2 * turn <= kernel.shared <= SHARED[HOPPER] // 2
    assert len(re.findall(r"cp\.async\.cg", kernel.ptx)) == 3 * turn // (16 * 128)


def decode(name: str, rows: int) -> Compiled:
    """Of a batch at context 1024."""
    layer = next(layer for layer in LAYERS if layer.name == name)
    pages = layer.pages(rows)
    splits = decode_splits(rows, layer.shape.heads // layer.shape.kv_heads, layer.shape.kv_heads, layer.shape.d, pages, 132)
    return compile_node(decode_node(layer.shape, rows, splits, HOPPER, pages=pages), HOPPER)


def test_weights_are_on_their_way_before_the_wait() -> None:
    """gemv's tiles are loaded, gemm's first ones fetched to L2, before the wait, in PTX and in machine code; gemv lets its
    dependents start before that, gemm never."""
    for kernel in compiled("products", HOPPER):
        choices = kernel.node.constexprs
        names = list(argument_types(kernel.node))
        early = [access for access in accesses(kernel.ptx, names) if access.early]
        loads = [access for access in early if access.reads]
        number_bytes = 1 if "fp8" in argument_types(kernel.node)["weight"] else 2  # of a gemv's
        vectors = number_bytes * choices["BN"] * choices["BK"] * (1 + choices["GATED"]) // (16 * 32 * choices["warps"])
        if kernel.node.kernel == "_gemv_words":
            assert len([load for load in loads if load.arguments == {"weight"}]) == choices["BN"] * (1 + choices["GATED"])
        elif kernel.node.kernel == "_gemv":
            tiles = min(choices["EARLY"], -(-choices["K"] // choices["BK"]))
            assert len(loads) >= tiles * vectors > 0, (choices, len(loads))
        else:
            assert {argument for load in loads for argument in load.arguments} <= {"scale"}
            assert any(access.op.startswith("prefetch") for access in early)
        code = [instruction.split()[1 if instruction.startswith("@") else 0] for instruction in kernel.instructions]
        before = code[: next(place for place, opcode in enumerate(code) if opcode.startswith("ACQBULK"))]
        assert sum(opcode.startswith("LDG") for opcode in before) == len(loads)
        assert ("PREEXIT" in before) == ("PREEXIT" in code) == kernel.node.kernel.startswith("_gemv"), choices


# ---- planted faults


@triton.jit
def _early_read(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    value = tl.load(x)
    tl.store(out, value)
    trigger(PDL)
    wait(PDL)
    page = tl.load(table)
    tl.store(out + page * 4096 + tl.arange(0, 4), tl.load(x + page * 8192 + tl.arange(0, 4)))


@triton.jit
def _careful(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    wait(PDL)
    page = tl.load(table).to(tl.int64)
    tl.store(out + page * 4096 + tl.arange(0, 4), tl.load(x + page * 8192 + tl.arange(0, 4)))


@triton.jit
def _skips_the_wait(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    if tl.program_id(0) == 1:
        wait(PDL)
        tl.store(out + tl.program_id(0), tl.load(x) + tl.load(table))


def planted(kernel: object) -> Compiled:
    with record(HOPPER) as nodes:
        launch(kernel, (2,), fp32(8), ints(8), fp32(8), warps=1)
    return compile_node(nodes[0], HOPPER)


def test_planted_faults_are_seen() -> None:
    """A read and a write before the wait, a path around it and a 32-bit page offset are found, and not in a kernel without them."""
    names = ["x", "table", "out"]
    good, bad, skips = (planted(kernel).ptx for kernel in (_careful, _early_read, _skips_the_wait))
    assert (early_reads(good, names), early_reads(bad, names)) == (set(), {"x"})
    assert [access.arguments for access in accesses(bad, names) if access.early and access.writes] == [{"out"}]
    assert not [access for access in accesses(good, names) if access.early]
    assert [ends_without_waiting(ptx) for ptx in (good, bad, skips)] == [False, False, True]
    assert narrow_products(bad, names, "table")
    assert not narrow_products(good, names, "table")


def test_a_spill_is_seen() -> None:
    """A kernel that holds more than a thread's registers shows a stack."""
    (node,) = product_nodes(Tile("gemv", 1, 16, 1024, early=4, warps=1), GemmShape(4096, HIDDEN), HOPPER)
    assert compile_node(node, HOPPER).stack > 0
