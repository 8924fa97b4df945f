"""What a rank launches before it is ready, on a GPU that does nothing: `python -m tests.support.engine.idle_boot '<EngineConfig>'`.

Prints JSON: how many kernels were found in Triton's cache on disk, and the name of the first that was not, where it ends.
"""

import json
import sys
from contextlib import suppress
from typing import Any

import msgspec
import torch
import triton

from engine.config import EngineConfig
from engine.rank.builder import build, load_rank
from engine.rank.parallel import Single
from kernels import launch as launcher
from kernels import linear
from kernels.precompile import set_cache_keys
from tests.support.idle_cuda import use_idle_cuda


def main() -> None:
    """Warm up, and run what is captured, by Triton's own launches. A second argument: keys are set as kernels are launched."""
    hits, misses = list[str](), list[str]()

    def note(*, src: Any, cache_hit: bool, **others: object) -> None:
        (hits if cache_hit else misses).append(src.name)
        if misses:
            raise LookupError(src.name)

    use_idle_cuda()
    take_kernels()
    set_everywhere("uploaded", lambda tensor, to: tensor.clone())  # to memory of torch's, as aligned as a device's
    triton.knobs.compilation.listener = note
    if len(sys.argv) == 2:
        set_cache_keys()
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    with torch.inference_mode(), suppress(LookupError):
        rank = load_rank(config, Single(), torch.device("cpu"), checked=False)
        build(rank, [20 for _ in config.kv_groups]).list_launches(0, 1)
    print(json.dumps({"hits": len(hits), "misses": misses}))


def take_kernels() -> None:
    """Wrappers launch for tensors of the CPU what they would for a GPU's; the library's products are left out."""
    linear._library = lambda x, weight, out: out
    set_everywhere("enabled", lambda x, module="": True)
    set_everywhere("processors", lambda device: 132)


def set_everywhere(name: str, value: Any) -> None:
    """Sets what our modules have imported under `name`; `launch` itself stays."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("kernels.", "engine.rank.")) and hasattr(module, name) and module is not launcher:
            setattr(module, name, value)


if __name__ == "__main__":
    main()
