"""What `tests.gpu.stages` runs, in this order. Times are bounds: kernels that nobody has compiled yet are compiled in them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuStage:
    """`arguments` are python's; seconds: at most; gpus: at least."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    gpus: int = 1


def _tests(name: str, seconds: float, gpus: int, files: str, *selected: str) -> GpuStage:
    return GpuStage(name, ("-m", "pytest", "-q", "-s", *files.split(), *selected), seconds, gpus)


def _bench(name: str, seconds: float, gpus: int, module: str, arguments: str) -> GpuStage:
    return GpuStage(name, ("-m", f"tests.bench.{module}", *arguments.split()), seconds, gpus)


_31B, _GPU = "--model dummy:31b --tp 4 --device cuda", "tests/gpu/test_"
_BOTH = "--slots 100 --max-len 9216 --loads mixed long"
_LOADS = f"--device cuda --prefill-budget 2048 {_BOTH}"
_EXAM = "--device cuda --tp 1 --no-faults --questions 4 --members 31b --format channel nvfp4 int8 int4-32 --setups TP=1"
STAGES = (
    _tests("selfcheck", 200, 1, f"{_GPU}selfcheck.py"),
    _tests("kernels", 300, 1, " ".join(f"{_GPU}{stem}.py" for stem in ("attention", "linear", "filters", "adjust", "experts"))),
    _tests("steps", 300, 1, " ".join(f"{_GPU}{stem}.py" for stem in ("decode_step", "step_clock", "page_check"))),
    _tests("drafts", 300, 1, f"{_GPU}drafts.py"),
    _tests("formats", 200, 1, f"{_GPU}formats.py", "-k", "not cap"),
    _tests("formats-31b", 200, 1, f"{_GPU}formats.py", "-k", "cap"),
    GpuStage("formats-exam", ("-m", "tests.quality.run", *_EXAM.split()), 200, 1),
    _tests("encoders", 100, 1, f"{_GPU}encode_stream.py"),
    _tests("one-gpu", 400, 1, f"{_GPU}one_gpu.py"),
    _tests("trtllm", 300, 1, f"{_GPU}trtllm.py", "-k", "not shard and not costs"),
    _tests("trtllm-31b", 240, 1, f"{_GPU}trtllm.py", "-k", "shard or costs"),
    _tests("nvfp4", 500, 1, f"{_GPU}nvfp4.py"),
    _bench("masked-31b", 150, 1, "masked_neighbours", "--model dummy:31b --shard-of 4 --device cuda --batch 32 --masked 8"),
    _bench("mixed-shard", 150, 1, "mixed", "--shard-of 4"),
    _bench("mixed-few", 150, 1, "mixed", "--shard-of 4 --budget 128 --prompt 64"),
    _bench("core-shard", 300, 1, "engine", "--model dummy:31b --shard-of 4 --tp 1 --device cuda"),
    _bench("core-shard-default", 300, 1, "engine", "--model dummy:31b --shard-of 4 --tp 1 --device cuda --sampling default"),
    _bench("drafts-31b", 150, 1, "step", "--shard-of 2 --tp 1 --drafts 5 --accepted 4.42"),
    _bench("drafts-e2b", 120, 1, "step", "--model dummy:e2b --tp 1 --drafts 2 --accepted 1.9"),
    _bench("drafts-26b", 150, 1, "step", "--model dummy:26b-a4b --tp 1 --drafts 4 --accepted 2.9 --batches 1 4 8 16 48"),
    _bench("core-drafts-31b", 300, 1, "engine", "--model dummy:31b --shard-of 2 --tp 1 --device cuda --drafts 5 --accepted 4.42"),
    _bench("loads-e2b", 300, 1, "engine", f"--model dummy:e2b --tp 1 {_LOADS}"),
    _bench("loads-26b", 400, 1, "engine", f"--model dummy:26b-a4b --tp 1 {_LOADS}"),
    _bench("auto-31b", 400, 1, "engine", f"--model dummy:31b --shard-of 2 --tp 1 {_LOADS} --drafts auto --accepted 4.42"),
    _bench("pictures", 200, 1, "encoders", "--members e2b 31b"),
    _bench("beside-pictures", 150, 1, "engine", "--model dummy:e2b --tp 1 --device cuda --loads pictures --max-len 16384"),
    _bench("verify", 150, 1, "verify_cuts", ""),
    _bench("sampling", 120, 1, "sampling", ""),
    _bench("loads-31b", 500, 2, "engine", f"--model dummy:31b --tp 2 {_LOADS}"),
    _tests("inboxes", 120, 2, f"{_GPU}inboxes.py"),
    _bench("sequence-parallel", 150, 2, "sequence_parallel", "--tp 2"),
    _tests("workers", 535, 2, "tests/engine/rank/test_worker_gpu.py"),
    _tests("killed-rank", 300, 2, "tests/cluster/test_group_gpu.py"),
    _tests("bf16", 480, 2, f"{_GPU}four_gpus.py", "-k", "test_nano and not fp32 and (12b or e4b or e2b)"),
    _tests("bf16-large", 400, 2, f"{_GPU}four_gpus.py", "-k", "test_nano and not fp32 and (31b or 26b)"),
    _tests("fp32", 480, 2, f"{_GPU}four_gpus.py", "-k", "fp32"),
    _tests("31b-shape", 480, 4, f"{_GPU}four_gpus.py", "-k", "31b_shape"),
    _bench("mixed-step", 240, 4, "mixed", "--tp 4"),
    _bench("protocol", 300, 4, "engine", _31B),
    _bench("decode-step", 240, 4, "step", "--tp 4 --check --steps 48"),
    _bench("allreduce_norm", 240, 4, "fused_allreduce_norm", "--tp 4 --check 1400"),
    _bench("prompts-31b", 200, 4, "engine", f"{_31B} {_BOTH} --batches 1 100 1x8192 --prefill-budget 8192 --tokens 4 --repeat 2"),
    _bench("drafts-31b-4", 120, 4, "step", "--tp 4 --drafts 5 --accepted 4.42"),
    _bench("auto-31b-4", 200, 4, "engine", f"{_31B} --batches 1 --slots 128 --max-len 32768 --loads mixed --drafts auto"),
    _bench("pictures-31b", 150, 4, "engine", f"{_31B} --loads pictures --max-len 16384"),
    _bench("fairness", 300, 4, "fairness", f"{_31B} --long 16384 --max-len 20480 --prefill-budget 2048 --seconds 0"),
)
