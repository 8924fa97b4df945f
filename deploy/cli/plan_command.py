"""The command `quartet plan`."""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.capability import probe
from deploy.cli.output import NO, OK, Part, Subparsers, Table, command, emit, gib
from deploy.models.resolve import MEMBERS
from deploy.settings import Settings, read_config, read_settings
from engine.architectures import read_model
from engine.errors import ConfigError
from engine.quantisation import read_quantisation
from engine.weight_formats import FORMATS, NVFP4_GPUS, NVFP4_NEEDS, PLAIN

if TYPE_CHECKING:
    from deploy.cli.sizing import Sizing

# What NVML reports as the whole memory, MiB; CUDA sees a little less, which the reserve covers.
GPUS = {"l40s": 46068, "a100-40": 40960, "a100": 81920, "h100": 81559, "h200": 143771, "b200": 183359}
NVFP4_NAMES = ("b200",)  # of GPUS
SIZES = (
    "tp", "dtype", "kv_dtype", "max_seqs", "max_len", "prefill_budget", "language_model_only", "memory_fraction", "weights",
    "head", "max_adapters", "max_rank",
)  # fmt: skip
Plan = dict[str, Any]  # as --json prints it
CONTEXTS = (1024, 4096, 9216, 32768, 131072)
MEMBER_CONTEXT = 8192  # of the table of all public shapes
LONGEST = 32768  # max_len of a bare --model, where the model has so many positions
_POOL_COLUMNS = ("pool", ">layers", ">KV heads", ">head dim", ">window", ">pages", ">page", ">size", ">tokens")

HELP = """\
The numbers come from the engine's own code: model and caches are built without memory, so they are what an engine allocates.
The five public shapes are known by name, with no network: e2b, e4b, 12b, 26b-a4b, 31b (or their hub ids).

  quartet plan --model 31b --tp 4 --gpu h200
  quartet plan deploy/gemma4.yaml --gpu-memory 80GiB --max-seqs 128
  quartet plan --model 26b-a4b --tp 2 --max-seqs 256 --max-len 131072 --gpu b200 --json
  quartet plan --gpu h100                                 # every shape in every format

Sliding layers keep a window of each sequence and are sized by max_seqs; full layers get what is left, and decide how many long
sequences run at once. Encoders of pictures and sound, which every rank has whole, and what they need to run are counted;
--language-model-only true leaves them out. --weights int4 of a public shape stands for a W4A16 folder in groups of 32, nvfp4 for
an NVFP4 folder whose four bits are kept (--gpu b200).
1.5 GiB are reserved for what CUDA, NCCL and the allocator hold, as H200s showed.

exit codes: 0 it fits; 1 it does not, or not one sequence of max_len does; 2 the question cannot be answered"""


def register(commands: Subparsers) -> None:
    parser = command(commands, "plan", run, "will this model fit: weights, KV pools, concurrency", HELP)
    parser.add_argument("config", type=Path, nargs="?", help="a Serve config; the options below win over it")
    parser.add_argument("--model", help="a shape by name, a hub id, or a folder")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"])
    settings = parser.add_argument_group("settings that decide what fits (docs/settings.md)")
    for name in SIZES:
        settings.add_argument("--" + name.replace("_", "-"))
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", choices=GPUS, help="a GPU by name (default: this machine's)")
    size.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="bytes of one GPU: 80GiB, 141GB")
    parser.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="lengths to count sequences at")


def byte_size(text: str) -> int:
    """`80GiB`, `141GB`, `512Mi` or plain bytes."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(re.sub("i$", "iB", text.strip()))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 80GiB, 141GB, 512MiB") from None


def run(args: argparse.Namespace) -> int:
    if args.config is None and args.model is None:
        plans = [report(settings_from(each), each) for each in member_questions(args)]
        emit(args, {"members": plans}, member_parts(plans))
        if any(plan["fits"] for plan in plans):
            return OK
        return NO
    plan = report(settings_from(args), args)
    emit(args, plan, parts(plan))
    if plan["fits"]:
        return OK
    return NO


def settings_from(args: argparse.Namespace) -> Settings:
    """A config's settings or defaults; options win. ConfigError."""
    given = {name: value for name in ("model", "device", *SIZES) if (value := getattr(args, name)) is not None}
    if args.config is None:
        return Settings.read(given)
    settings = read_settings(read_config(args.config), str(args.config))
    return Settings.read({**msgspec.to_builtins(settings), **given})


def report(settings: Settings, args: argparse.Namespace) -> Plan:
    """The plan as plain data; sizes in bytes. `fits` False has a `reason`."""
    from deploy.cli import sizing

    with sizing.in_format(sizing.shape_folder(settings.model, settings.revision), settings.weights) as folder:
        return report_of(settings, args, folder)


def report_of(settings: Settings, args: argparse.Namespace, folder: Path) -> Plan:
    from deploy.cli import sizing

    if args.config is None and args.max_len is None:
        settings = msgspec.structs.replace(settings, max_len=min(LONGEST, read_model(folder).max_position))
    if not all(1 <= length <= settings.max_len for length in args.context or ()):
        raise ConfigError(f"plan: --context: only lengths from 1 to max_len, {settings.max_len}")
    engine = sizing.configured(settings, folder)
    memory = 0 if engine.device == "cpu" else gpu_memory(args)
    if engine.weights == "nvfp4" and engine.device == "cuda":
        check_nvfp4(args)
    weights, parameters = sizing.weight_bytes_and_count(engine)
    question = {
        "model": settings.model,
        "device": engine.device,
        **{name: getattr(engine, name) for name in SIZES},
        "weights": read_quantisation(folder, engine.weights).name,
        "gpu_memory": memory,
        "parameters": parameters,
        "weights_per_rank": weights,
    }
    try:
        return {**question, **figures(sizing.size(engine, weights, memory), args.context)}
    except ConfigError as error:
        return {**question, "fits": False, "reason": str(error), "fits_at_tp": sizing.fits_at(settings, folder, memory)}


def member_questions(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The same question for each public shape: in the format asked for, or in each one that is
    published or made at load."""
    from deploy.cli.sizing import PUBLISHED_FORMATS

    at_load = [name for name, formats in FORMATS.items() if PLAIN in formats or formats[0].packer is not None]
    made = [*at_load, *(name for name in PUBLISHED_FORMATS if name != "nvfp4" or args.gpu in NVFP4_NAMES)]
    if args.weights is not None:
        made = [args.weights]
    for member in MEMBERS:
        for name in made:
            contexts = args.context or [MEMBER_CONTEXT]
            yield argparse.Namespace(**vars(args) | {"model": member, "weights": name, "context": contexts})


def figures(sized: "Sizing", contexts: Sequence[int] | None) -> Plan:
    longest = sized.config.max_len
    lengths = sorted({length for length in (*(contexts or CONTEXTS), longest) if 1 <= length <= longest})
    held = sized.concurrency(longest)
    reason = f"not one sequence of max_len {longest} tokens fits the KV pools: they hold {sized.longest} tokens of one; "
    return {
        "fits": held > 0,
        **({} if held else {"reason": reason + "lower max_len or max_seqs, or raise tp"}),
        "kv_budget": sized.budget,
        "pool_bytes": sum(pool.pool_bytes for pool in sized.pools),
        "pools": [
            {
                "name": pool.group.name, "layers": len(pool.group.layers), "kv_heads": pool.group.kv_heads,
                "head_dim": pool.group.head_dim, "window": pool.group.window, "page": pool.group.page, "pages": pool.pages,
                "page_bytes": pool.page_bytes, "bytes": pool.pool_bytes, "table_bytes": pool.table_bytes,
                "tokens": (pool.pages - 1) * pool.group.page,
            }
            for pool in sized.pools
        ],
        "concurrency": [{"tokens": length, "sequences": sized.concurrency(length)} for length in lengths],
    }  # fmt: skip


def gpu_memory(args: argparse.Namespace) -> int:
    """Bytes, as asked, else of this machine's smallest GPU. ConfigError without both."""
    if args.gpu_memory is not None:
        return int(args.gpu_memory)
    if args.gpu is not None:
        return GPUS[args.gpu] << 20
    gpus = probe().gpus
    if not gpus:
        raise ConfigError(f"plan: this machine shows no GPU: say --gpu ({', '.join(GPUS)}) or --gpu-memory 80GiB")
    return min(gpu.memory for gpu in gpus)


def check_nvfp4(args: argparse.Namespace) -> None:
    if args.gpu is not None:
        wrong = args.gpu not in NVFP4_NAMES
    else:
        wrong = args.gpu_memory is None and any(gpu.capability not in NVFP4_GPUS for gpu in probe().gpus)
    if wrong:
        raise ConfigError(f"plan: weights nvfp4 needs {NVFP4_NEEDS} (--gpu {', '.join(NVFP4_NAMES)})")


def member_parts(plans: Sequence[Plan]) -> Iterator[Part]:
    first = plans[0]
    yield f"on {first['tp']} x {gib(first['gpu_memory'])}, max_seqs {first['max_seqs']}"
    lengths = sorted({row["tokens"] for plan in plans for row in plan.get("concurrency", ())})
    yield Table(("model", "weights", ">a rank", *(f">of {length:,} tokens" for length in lengths), ">else at tp"), [
        (plan["model"], plan["weights"], gib(plan["weights_per_rank"]), *member_counts(plan, lengths)) for plan in plans
    ])  # fmt: skip


def member_counts(plan: Plan, lengths: Sequence[int]) -> Iterator[str]:
    counts = {row["tokens"]: f"{row['sequences']:,}" for row in plan.get("concurrency", ())}
    for length in lengths:
        yield counts.get(length, "-")
    yield "" if counts else str(plan.get("fits_at_tp") or "-")


def parts(report: Plan) -> Iterator[Part]:
    if report["device"] == "cpu":
        where = "on the CPU"
    else:
        where = f"on GPUs of {gib(report['gpu_memory'])}"
    if report["kv_dtype"] == "auto":
        stored = ""
    else:
        stored = f", KV in {report['kv_dtype']}"
    numbers = f"{report['parameters'] / 1e9:.3f} B parameters of text, tp {report['tp']}, {report['dtype']}{stored}"
    yield f"{report['model']}: {numbers}, {where}"
    yield f"weights per rank  {gib(report['weights_per_rank'])}, {report['weights']}"
    if "pools" in report:
        yield f"KV per rank       {gib(report['pool_bytes'])} of {gib(report['kv_budget'])} that may be spent on it"
        yield Table(_POOL_COLUMNS, [
            (row["name"], str(row["layers"]), str(row["kv_heads"]), str(row["head_dim"]), str(row["window"] or "all"),
             f"{row['pages']:,}", f"{row['page_bytes'] / 1024:g} KiB", gib(row["bytes"]), f"{row['tokens']:,}")
            for row in report["pools"]
        ])  # fmt: skip
        sequences = [(f"{row['tokens']:,}", f"{row['sequences']:,}") for row in report["concurrency"]]
        yield Table((">tokens a sequence", f">run at once, of max_seqs {report['max_seqs']}"), sequences)
    yield "it fits" if report["fits"] else f"it does not fit: {report['reason']}"
    if report.get("fits_at_tp"):
        yield f"it would fit at tp {report['fits_at_tp']}"
