"""transformers with the dummy weights that the engine draws: the judge of a model too large to keep on disk."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from engine.geometry import Geometry, read_geometry
from engine.rank.models.gemma4_weights import TENSORS
from tests.support.engine.dummy_tensors import dummy_tensor
from tests.support.judge.oracle import load_oracle


def judge_logits(
    folder: Path, load: str, dtype: torch.dtype, device: torch.device, prompts: list[list[int]], rows: int, seed: int = 0
) -> list[Tensor]:
    """Soft-capped logits, fp32 [rows, vocab] on the CPU, of each prompt's last `rows` positions, by transformers in `dtype`.

    load: the folder's safetensors, or dummy: the weights of `weights.dummy` on the same device. TF32 stays off.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    if load == "dummy":
        model = build(folder, dtype, device)
        fill(model, read_geometry(folder), device, seed)
    else:
        model = load_oracle(folder, dtype).to(device)
    logits = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model(input_ids=ids, use_cache=False, logits_to_keep=rows)
        logits.append(out.logits[0].float().cpu())
    return logits


def build(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval()


def fill(model: torch.nn.Module, geometry: Geometry, device: torch.device, seed: int) -> None:
    """Fill the text's parameters and layer scalars from their seeds; an unknown one is an error, a forgotten one a wrong logit."""
    held = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    with torch.no_grad():
        for name, tensor in held.items():
            if not name.startswith(("model.language_model.", "lm_head.")):  # encoders of pictures and audio
                continue
            tensor.copy_(dummy_tensor(name, TENSORS, geometry, seed, device))


def main() -> None:
    """`python -m tests.gpu.judge '<json>'`: the arguments of `judge_logits`, and where to save what it returns."""
    asked = json.loads(sys.argv[1])
    began = time.monotonic()
    torch.set_num_threads(1)
    found = judge_logits(
        Path(asked["folder"]),
        asked["load"],
        getattr(torch, asked["dtype"]),
        torch.device(asked["device"]),
        asked["prompts"],
        asked["rows"],
    )
    torch.save(found, asked["out"])
    print(f"transformers {asked['dtype']} on {asked['device']} in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
