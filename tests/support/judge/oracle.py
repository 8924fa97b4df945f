"""transformers as the judge of our model: its logits, and how close its routers' choices were."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

ROUTER_MARGIN = 5e-5  # nearer choices of experts may fall either way between two exact implementations


@dataclass(frozen=True)
class Verdict:
    """What transformers says of one sequence of n tokens.

    logits  fp32 [n, vocab], soft-capped
    sure    leading positions that no near tie of a router has touched: a tie at one position moves all that follow
    """

    logits: Tensor
    sure: int


def error(made: Tensor, right: Tensor) -> float:
    """Returns the largest difference, relative to the largest value."""
    return ((made - right).abs().max() / right.abs().max()).item()


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, eager attention; fails unless every tensor found its place."""
    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def judge(
    model: transformers.PreTrainedModel,
    ids: Tensor,
    spans: Sequence[tuple[int, int]] = (),
    media: Mapping[str, Tensor] | None = None,
) -> Verdict:
    """One full forward over ids int64 [n]; positions [first, last) of each span are an image's. media: what the model is given
    besides (`pictures.as_inputs`)."""
    margins = [torch.full((ids.shape[0],), torch.inf, device=ids.device)]
    routers = [module for module in model.modules() if type(module).__name__ == "Gemma4TextRouter"]

    def look(module: Any, _inputs: Any, out: Any) -> None:
        top = out[0].topk(module.config.top_k_experts + 1, dim=-1).values.log()
        margins.append(top[:, -2] - top[:, -1])

    hooks = [router.register_forward_hook(look) for router in routers]
    masks = image_masks(model, ids, spans) if spans else None
    logits = model(ids[None], attention_mask=masks, **(media or {})).logits[0].float()
    for hook in hooks:
        hook.remove()
    close = (torch.stack(margins).amin(0) < ROUTER_MARGIN).nonzero()
    return Verdict(logits, int(close[0]) if len(close) else ids.shape[0])


def image_masks(model: transformers.PreTrainedModel, ids: Tensor, spans: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """The masks that transformers makes for a prompt with images in `spans`."""
    code, types = sys.modules[type(model).__module__], torch.zeros_like(ids)
    for first, last in spans:
        types[first:last] = 1
    given = {"inputs_embeds": model.get_input_embeddings()(ids[None]), "attention_mask": None, "past_key_values": None}
    given |= {"config": model.config.get_text_config(), "position_ids": torch.arange(len(ids))[None]}
    blocks = code.get_block_sequence_ids_for_mask(types[None], ids.device)
    return code.create_masks_for_vision_model(**given, block_sequence_ids=blocks)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), as transformers applies it."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
