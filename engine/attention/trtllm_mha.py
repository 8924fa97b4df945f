"""FlashInfer's TensorRT-LLM kernels: trtllm-gen on SM100; on request, xqa for decode rows on 9.0 and 12.x."""

from collections.abc import Iterator

from packaging.version import Version

from engine.attention.backend_entry import BackendEntry, Obstacle, PackageState, Platform, RowKind

TESTED_VERSIONS = ("0.7.0", "0.8")  # FlashInfer from, and below: its calls are pinned (tests/support/flashinfer_calls.py)
CUBIN_DOWNLOAD_COMMAND = "FLASHINFER_CUBIN_DIR=/opt/flashinfer-cubins flashinfer download-cubin"
_SM100 = 10
_XQA = (9, 12)  # major versions


def _obstacles(kind: RowKind, platform: Platform) -> Iterator[Obstacle]:
    if platform.architecture is None:
        yield Obstacle("it needs a GPU; this engine runs on the CPU")
        return
    gpu = platform.gpu
    major = platform.architecture[0]
    if major in _XQA:
        yield Obstacle(f"{gpu} is not of the SM100 family: triton by default", by_default=True)
        if kind == "extend":
            yield Obstacle(f"{gpu} is not of the SM100 family, which alone has the kernels for prefill")
    elif major != _SM100:
        yield Obstacle(f"{gpu} is not of the SM100 family, and FlashInfer has no such kernels for it")
    if platform.dtype != "bfloat16":
        yield Obstacle(f"its kernels compute in bfloat16, not {platform.dtype}")
    if platform.kv_dtype == "fp8":
        yield Obstacle("over fp8 pages it would round queries to fp8 too; kv_dtype fp8 runs on triton")
    if platform.drafts and kind == "decode":
        yield Obstacle("its decode rows are of one token, and with mtp.model they have drafts")
    yield from missing(platform, fetched=major == _SM100)


def missing(platform: Platform, *, fetched: bool) -> Iterator[Obstacle]:
    """fetched: FlashInfer would fetch missing kernels at the first request."""
    files = platform.flashinfer
    if files.version is None:
        yield Obstacle(f"{platform.gpu} without FlashInfer", "make install-gpu")
        return
    oldest, ceiling = (Version(version) for version in TESTED_VERSIONS)
    if not oldest <= Version(files.version) < ceiling:
        yield Obstacle(f"FlashInfer {files.version} is not among those tried, {oldest} to below {ceiling}", "make install-gpu")
    if files.launcher is None:
        yield Obstacle(
            f"FlashInfer {files.version} can build no launcher: nvcc and ninja are not both there",
            "install the CUDA toolkit and ninja, or flashinfer-jit-cache of the same version",
        )
    if fetched and files.cubins is None and not platform.download:
        yield Obstacle(
            f"FlashInfer {files.version} lacks its kernels on disk, and no request may wait for a download",
            f"when the image is built: {CUBIN_DOWNLOAD_COMMAND}; or flashinfer_download: true",
        )


def _reason(platform: Platform) -> str:
    files = platform.flashinfer
    return f"{platform.gpu} with FlashInfer {files.version}, kernels in {files.cubins or 'the network'}"


def _package(platform: Platform) -> PackageState | None:
    files = platform.flashinfer
    if platform.architecture is None or files.version is None:
        return None
    if files.cubins:
        kernels = f"kernels in {files.cubins}"
    else:
        kernels = "no kernels of trtllm-gen on disk"
    launcher = {"prebuilt": "launchers from flashinfer-jit-cache", "nvcc": "launchers built by nvcc"}.get(files.launcher or "")
    usable = files.launcher is not None and (files.cubins is not None or platform.architecture[0] != _SM100)
    detail = f"{files.version}: {kernels}, {launcher or 'no way to build launchers'}"
    return PackageState("flashinfer", usable, detail, f"in the image: {CUBIN_DOWNLOAD_COMMAND}")


TRTLLM_MHA = BackendEntry("trtllm_mha", "cuda", "engine.rank.attention.trtllm", _obstacles, _reason, _package)
