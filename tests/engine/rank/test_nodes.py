"""A decode step as its launches, listed for an H200 without one: how many there are, and that each compiles."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, engine_config
from engine.plan import StepPlan, encode_plan, read_plan
from engine.quantisation import Quantisation
from engine.rank.builder import build, load_rank
from engine.rank.parallel import FirstOfGroup
from engine.rank.runner import Runner
from engine.rank.stages.forward_stage import Forwarded
from engine.rank.stages.sample_stage import LARGEST_SAMPLERS, SAMPLERS
from engine.rank.step_clock import HostEvent
from engine.step_shapes import StepShapes, StepSizes, mixed_widths
from engine.weight_formats import FORMATS, INT8, WeightFormat
from kernels.slots import gather_pages
from tests.nano.random_models import model_folder
from tests.support.compiled import compile_node
from tests.support.engine import drafters
from tests.support.engine.listed_steps import META, SLOTS, drafts, geometry, int32, mixed, sampled, step
from tests.support.engine.quantised import saved
from tests.support.launches import Node, record

pytestmark = pytest.mark.cpu

# Bytes of stack that are known: the slow path of sin and cos.
STACK = {("_rotary", (9, 0)): 32}


def variants(nodes: Iterable[Node]) -> set[str]:
    """What of launches is compiled apart."""
    return {repr((node.kernel, node.specialization, node.constexprs)) for node in nodes}


def test_decode_rows_behind_a_chunk_need_no_variants_of_their_own() -> None:
    """Wherever they begin: a variant that is first met while requests run is compiled while they wait. One whose argument's place
    is compiled in is seen."""
    ready = variants(mixed(2041, 7, "random:31b"))
    for chunk, decodes in ((2046, 2), (2045, 3), (1993, 6)):
        assert variants(mixed(chunk, decodes, "random:31b")) <= ready
    rows, table = int32(12), int32(12, 64)
    with record(target=(9, 0)) as nodes:
        for first in (0, 2):
            gather_pages(int32(SLOTS, 64), rows[:4], rows[:4], 32, 1024, table.flatten()[first : first + 256].view(4, 64))
    assert len(variants(nodes)) == 2


def started(
    member: str, folder: Path, shapes: Callable[[EngineConfig], StepShapes], **settings: object
) -> tuple[Runner, set[str]]:
    """A rank of four, with a drafter, on the meta device, and the variants of all that it launches before it is ready."""
    model = model_folder(member)
    sizes = {"max_seqs": 8, "max_len": 2048, "prefill_budget": 1024}
    mtp = {"model": str(drafters.write(model, folder)), "drafts": "auto"}
    config = engine_config(**{
        "model": str(model), "tp": 4, "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "mtp": mtp, **sizes, **settings
    })  # fmt: skip
    with record(target=(9, 0)) as nodes, torch.inference_mode():
        rank = load_rank(config, FirstOfGroup(config.tp), META, checked=False)
        runner = build(rank, [2 for _ in config.kv_groups], shapes(config))
        runner.list_launches(0, 1)
    return runner, variants(nodes)


def met(runner: Runner, prompts: list[int], decodes: int, width: int) -> set[str]:
    """The variants of an unpadded step: chunks of these lengths, and sequences of `width` tokens."""
    rows = [(slot, width, 0) for slot in range(decodes)]
    chunks = [(slot, 0, length, length - 1, 0, 0) for slot, length in enumerate(prompts, decodes)]
    plan = read_plan(encode_plan(StepPlan(1, chunks=chunks, rows=rows)))
    with record(target=(9, 0)) as nodes, torch.inference_mode():
        runner.inputs.upload(plan)
        step = Forwarded(plan, b"", HostEvent(), None, runner.inputs.plan[:0])
        runner._forward_unpadded(step, StepSizes.of(plan))
        runner._sampled(step.batch, step.hidden, runner.slots.result_rows(plan.result_slots, plan.step, width))
    return variants(nodes)


@pytest.mark.parametrize(("member", "weights"), [
    ("random:31b", "plain"), ("random:26b-a4b", "plain"), ("random:e2b", "plain"), ("random:26b-a4b", "fp8")
])  # fmt: skip
def test_a_step_of_any_size_needs_no_variants_but_those_of_the_start(
    member: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the prompt tokens of a step, its decode rows and their drafts. Planted fault: where no step with prompts is
    captured, prefills of a whole budget alone leave more to be compiled while requests wait than prefills of several sizes do."""
    runner, ready = started(member, tmp_path, StepShapes.of, weights=weights)
    widths = mixed_widths(runner.shapes.widths)
    sizes = ((1, 0), (1, 3), (3, 0), (7, 2), (13, 3), (31, 1), (50, 2), (64, 0), (97, 6), (200, 1), (509, 3), (600, 5), (1001, 7))
    some = set().union(*(met(runner, [first], rows, width) for first, rows in sizes for width in widths))
    assert some <= ready, "\n".join(sorted(some - ready))

    def unpadded(config: EngineConfig) -> StepShapes:
        shapes = StepShapes.of(config)
        return replace(shapes, sizes=tuple(sizes for sizes in shapes.sizes if not sizes.prompts))

    late = some - started(member, tmp_path, unpadded, weights=weights)[1]
    monkeypatch.setattr(StepShapes, "warm_rows", property(lambda shapes: (shapes.prefill,)))
    later = some - started(member, tmp_path, unpadded, weights=weights)[1]
    assert late < later


def test_many_short_prompts_need_no_variants_but_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may hold more rows than a prompt may have: its router takes another tile. Planted: the start runs one prompt alone."""
    settings = {"max_len": 1024, "prefill_budget": 8192}
    runner, ready = started("random:26b-a4b", tmp_path, StepShapes.of, **settings)
    many = met(runner, 8 * [1024], 0, 1)
    assert many <= ready, "\n".join(sorted(many - ready))
    monkeypatch.setattr(StepShapes, "warm_rows", property(lambda shapes: (1, shapes.longest)))
    assert any("_many_logits" in variant for variant in many - started("random:26b-a4b", tmp_path, StepShapes.of, **settings)[1])


def test_an_fp8_head_needs_no_variants_but_those_of_the_start(tmp_path: Path) -> None:
    """Whatever the rows of a step. Planted: the start of a bf16 head lacks them."""
    runner, ready = started("random:31b", tmp_path, StepShapes.of, head="fp8")
    sizes = ((1, 0), (7, 2), (97, 6), (1001, 7))
    some = set().union(*(met(runner, [first], rows, width) for first, rows in sizes for width in (1, 4)))
    assert any("_recheck" in variant for variant in some)
    assert some <= ready, "\n".join(sorted(some - ready))
    assert {variant for variant in some - started("random:31b", tmp_path, StepShapes.of)[1] if "_recheck" in variant}


def test_what_warms_up_has_the_variants_of_what_is_captured() -> None:
    """Two of the samplers run before all are captured, and drafts of any number share the variants of adjusted rows."""
    listed = {(name, width): variants(sampled("random:e2b", name, 8, width)) for name in SAMPLERS for width in (1, 3, 4)}
    for width in (1, 3, 4):
        warmed = set().union(*(listed[name, width] for name in LARGEST_SAMPLERS))
        assert {variant for name in SAMPLERS for variant in listed[name, width]} <= warmed
        assert not warmed <= listed["small_top_k", width] | listed["argmax", width]
    adjusted = [{variant for variant in listed["adjusted_argmax", width] if "_adjust" in variant} for width in (3, 4)]
    assert adjusted[0] == adjusted[1]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_dense_layer_is_seven_launches(rows: int) -> None:
    """QKV, attention, O, norm, gate and up, down, norm: seven nodes in each of the 60 layers of the 31B; eleven around them."""
    names = [node.kernel for node in step("31b", rows)]
    products = "_gemv" if rows == 1 else "_gemm"
    layer = [products, "decode_kernel", products, "_allreduce_norm", products, products, "_allreduce_norm"]
    before = ["_apply", "_inputs", "_pages", "_pages", "_rotary", "_rotary", "_embed", "_allreduce_norm"]
    assert names == before + 60 * layer + [products, "_local_best", "_choose"]


@pytest.mark.parametrize("kept", [INT8, FORMATS["nvfp4"][0].drawn()], ids=["int8", "nvfp4"])
def test_a_layer_of_a_librarys_products(kept: WeightFormat) -> None:
    """Products are the library's; the sums of their parts go over inboxes in our norms, as with other formats."""
    weights = Quantisation(((("Linear",), kept),))
    names = [node.kernel for node in step("random:31b", 8, weights=weights)]
    layer = ["decode_kernel", "_allreduce_norm", "_gelu_mul", "_allreduce_norm"]
    assert names[8:-3] == len(geometry("random:31b").layers) * layer
    assert names.count("_allreduce_norm") == [node.kernel for node in step("random:31b", 8)].count("_allreduce_norm")


def test_captured_steps_with_prompts_in_int8(tmp_path: Path) -> None:
    """Steps of other sizes launch nothing but what the start has launched. Planted fault: the products of plain weights are new."""
    folder = saved(model_folder("random:31b"), tmp_path / "saved", kind="int8")
    runner, ready = started(str(folder), tmp_path, StepShapes.of)
    assert any(sizes.prompts for sizes in runner.shapes.sizes)
    assert set().union(*(met(runner, [first], rows, 1) for first, rows in ((1, 0), (13, 3), (200, 1), (1001, 7)))) <= ready
    assert not variants(step("random:31b", 8)) <= ready


@pytest.mark.parametrize("rows", [1, 8, 24, 64])
def test_a_layer_with_experts(rows: int) -> None:
    """Thirteen launches in each of the 26B's 30 layers, of one row twelve; a norm's rows are not shared out: routers read the
    residual."""
    names = [node.kernel for node in step("26b-a4b", rows)]
    products = "_gemv" if rows == 1 else "_gemm"
    experts = ["_group"] * (rows > 1) + ["_grouped", "_grouped", "_combine"]
    norm = "_allreduce_norm"
    layer = [products, "decode_kernel", products, norm, products, products, "_logits", "_route", *experts, norm]
    assert names[7:-3] == [norm] + 30 * layer


@pytest.mark.parametrize(("member", "head"), [("31b", "_local_best"), ("e2b", "_best_of_clusters")])
def test_a_pass_of_a_drafter(member: str, head: str) -> None:
    """One kernel for what stands and one where counts are kept; the pages and rotations of a step's passes once; of each pass the
    embedding, 7 launches a layer and the head, and between passes the projection. Each compiles without spills; nothing asks the
    device."""
    nodes = drafts(member, 8, 3)
    norm = "_allreduce_norm"
    layer = ["_product", "decode_kernel", "_product", norm, "_product", "_product", norm]
    one = ["_embed", norm, "_product", norm, *4 * layer, "_product", head, "_choose"]
    names = ["_product" if node.kernel in {"_gemv", "_gemm"} else node.kernel for node in nodes]
    assert names == [
        "_accept", "_count_accepted", "_pages", "_pages", "_rotary", "_rotary", *one, "_product", *one, "_product", *one
    ]  # fmt: skip
    for node in {(node.kernel, repr(node.constexprs)): node for node in nodes}.values():
        made = compile_node(node, (9, 0))
        assert made.shared <= 232448, node
        assert made.stack <= STACK.get((node.kernel, (9, 0)), 0), (node.kernel, made.stack)


@pytest.mark.parametrize(("member", "rows", "target"), [("31b", 1, (9, 0)), ("31b", 96, (9, 0)), ("26b-a4b", 1, (9, 0))])
def test_every_launch_compiles(member: str, rows: int, target: tuple[int, int]) -> None:
    """Each distinct launch of a step compiles for its target, within its shared memory; fused norms and inputs without spills."""
    distinct = {node.variant: node for node in step(member, rows)}
    for node in distinct.values():
        made = compile_node(node, target)
        print(f"{node.kernel:16} {node.grid!s:16} {made.registers:4} registers, {made.shared:6} B shared, stack {made.stack}")
        assert made.shared <= 232448, node
        assert made.stack <= STACK.get((node.kernel, target), 0), (node.kernel, made.stack)
