"""The format of each matrix of a checkpoint, from config.json or hf_quant_config.json. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache
from itertools import chain
from pathlib import Path

from engine.checkpoint import read_optional, tensor_names
from engine.errors import CheckpointError
from engine.protocol import JsonObject
from engine.weight_formats import FORMATS, PLAIN, WeightFormat

_ALL = "Linear"  # a target: every matrix
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_EIGHT_BITS = re.compile(r"\.experts\.|\bper_layer_")  # also with `weights: nvfp4`
_FUSED_EXPERTS = r"re:.*\.experts\.(gate_up|down)_proj$"  # no `Linear`
KV_SCALE = re.compile(r".*\.self_attn\.(([qkv]|kv)_scale|[qkv]_proj\.([qkv]_scale|output_scale))")
_INPUT_SCALE = re.compile(r"(.*)\.input_(global_)?scale")

Groups = tuple[tuple[tuple[str, ...], WeightFormat], ...]  # targets and format of each
_READ = "compressed-tensors and modelopt FP8 (channel, tensor, 128x128 block), NVFP4, W8A8 int8, W4A16 int4 (groups 32, 64, 128)"
_KV_FP8 = ("", "FP8", "8-bit float tensor", "8-bit float attn_head")
_IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert")  # lists of plain matrices


@dataclass(frozen=True)
class Quantisation:
    groups: Groups = ()  # targets (names, `re:` patterns, `*`, or `Linear` for all) and the format of their matrices
    ignored: tuple[str, ...] = ()  # names and patterns of plain matrices
    fused: bool = True  # a layer's experts are one tensor, else one each
    notes: tuple[str, ...] = ()  # settings that are not followed, a sentence each
    has_kv_scales: bool = True  # scales of K and V are those of fp8 pages

    @property
    def name(self) -> str:
        held = {weights.weight for _, weights in self.groups}
        return ", ".join(name for name, formats in FORMATS.items() if formats[0].weight in held) or "plain"

    def format_of(self, matrix: str) -> WeightFormat:
        """The format of a matrix by its published name, without `.weight`."""
        if _names(self.ignored, matrix):
            return PLAIN
        found = next((weights for targets, weights in self.groups if _ALL in targets or _names(targets, matrix)), PLAIN)
        if found.eight_bits is not None and _EIGHT_BITS.search(matrix):
            return found.eight_bits
        return found

    def is_unused(self, name: str) -> bool:
        """A scale of KV pages, or of a quantised matrix's activations."""
        matrix = _INPUT_SCALE.fullmatch(name)
        return KV_SCALE.fullmatch(name) is not None or (matrix is not None and self.format_of(matrix[1]) is not PLAIN)

    def drawn(self) -> "Quantisation":
        return replace(self, groups=tuple((targets, weights.drawn()) for targets, weights in self.groups))


UNQUANTISED = Quantisation()


def read_quantisation(folder: Path, setting: str = "auto") -> Quantisation:
    """setting: `auto`, or a format's name. CheckpointError: unsupported, or another format than
    asked."""
    config = read_optional(folder / "config.json")
    settings = _settings(folder, config)
    schemes = tuple(_schemes(settings))
    kv_format = _kv_format(settings)
    fused = not (_has_experts(config) and any(_ONE_EXPERT.search(name) for name in tensor_names(folder)))
    wanted, *_ = FORMATS.get(setting, (PLAIN,))
    notes = tuple(_notes(kv_format))
    has_scales = kv_format in _KV_FP8
    if not schemes:
        if wanted is PLAIN and setting in ("auto", "plain"):
            return Quantisation((), (), fused, notes, has_scales)
        if wanted.packer is not None:
            return Quantisation((((_ALL,), wanted.packed_at_load()),), (), fused, notes, has_scales)
        raise CheckpointError(f"{folder}: this checkpoint is not quantised; Quartet loads {setting} weights")
    ignored = tuple(next((settings[key] for key in _IGNORED if settings.get(key)), ()))
    if fused and settings.get("quant_method") == "compressed-tensors":
        ignored += (_FUSED_EXPERTS,)
    groups = tuple((targets, _format(folder, scheme, setting)) for targets, scheme in schemes)
    if setting == "nvfp4":
        if all(weights.eight_bits is None for _, weights in groups):
            raise CheckpointError(f"{folder}: this checkpoint has no NVFP4 matrices: set weights: auto")
        notes += ("activations become four bits, too, also of a weight-only folder; experts and per-layer inputs stay in fp8",)
    if any(weights.is_static for _, weights in groups):
        notes += ("the folder's static scales of activations are not used: each token's activations get a scale of their own",)
    return Quantisation(groups, ignored, fused, notes, has_scales)


def _kv_format(settings: JsonObject) -> str:
    asked = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo") or ""
    if isinstance(asked, dict):
        return _scheme(asked)
    return str(asked)


def _notes(kv_format: str) -> Iterable[str]:
    if kv_format in _KV_FP8[1:]:
        yield f"the folder asks for a KV cache in {kv_format}: `kv_dtype: fp8` serves it so, with the folder's scales"
    elif kv_format:
        yield f"the folder asks for a KV cache in {kv_format}: its scales are not used"


def _format(folder: Path, scheme: str, setting: str) -> WeightFormat:
    if setting == "auto":
        allowed = tuple(FORMATS.values())
    else:
        allowed = (FORMATS[setting],)
    for found in chain.from_iterable(allowed):
        if scheme in found.schemes:
            return found
    if setting in ("auto", "plain"):
        loaded = "bf16, fp16 and fp32 weights"
    else:
        loaded = f"{setting} weights"
    if setting == "auto":
        loaded += f", and {_READ}"
    raise CheckpointError(f"{folder}: this checkpoint is quantised ({scheme}); Quartet loads {loaded}")


def _settings(folder: Path, config: JsonObject) -> JsonObject:
    said = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if said is None and (modelopt := read_optional(folder / "hf_quant_config.json")):
        said = {"quant_method": "modelopt", **(modelopt.get("quantization") or {})}
    return said or {}


def _has_experts(config: JsonObject) -> bool:
    return bool((config.get("text_config") or config).get("num_experts"))


def _schemes(settings: JsonObject) -> Iterable[tuple[tuple[str, ...], str]]:
    method = str(settings.get("quant_method") or "an unnamed format")
    groups = settings.get("config_groups") or {}
    if method == "compressed-tensors":
        for group in groups.values():
            parts = [f"{_scheme(group.get('weights') or {})} weights"]
            if group.get("input_activations"):
                parts.append(f"{_scheme(group['input_activations'])} activations")
            yield tuple(group.get("targets") or (_ALL,)), ", ".join([method, *parts])
    elif layers := settings.get("quantized_layers"):
        by_scheme: dict[str, list[str]] = {}
        for name, numbers in layers.items():
            by_scheme.setdefault(f"{method}, {numbers.get('quant_algo')}", []).append(name)
        yield from ((tuple(names), scheme) for scheme, names in by_scheme.items())
    elif blocks := settings.get("weight_block_size"):
        yield (_ALL,), f"{method}, {'x'.join(map(str, blocks))} {settings.get('activation_scheme')}"
    elif settings and (method != "modelopt" or settings.get("quant_algo")):  # ModelOpt may quantise the KV cache alone
        yield (_ALL,), ", ".join(filter(None, (method, settings.get("quant_algo"))))


def _scheme(numbers: JsonObject) -> str:
    """A scheme in words: `8-bit float channel`, `4-bit int group of 32 asymmetric`."""
    strategy = numbers.get("strategy") or ("group" if numbers.get("group_size") else "tensor")  # the defaults of compressed-tensors
    words = [f"{numbers.get('num_bits')}-bit", str(numbers.get("type")), strategy]
    if numbers.get("group_size") and strategy in ("group", "tensor_group"):
        words.append(f"of {numbers['group_size']}")
    if numbers.get("block_structure"):
        words.append("x".join(map(str, numbers["block_structure"])))
    if numbers.get("symmetric") is False:
        words.append("asymmetric")
    if numbers.get("actorder") in (True, "group", "dynamic"):  # the folder has g_idx; others keep the columns' order
        words.append("in order of activations")
    if numbers.get("dynamic"):
        words.append("dynamic")
    return " ".join(words)


def _names(patterns: tuple[str, ...], matrix: str) -> bool:
    return matrix in patterns or any(pattern.match(matrix) for pattern in _compiled(patterns))


@cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """One expression for all wildcards, since a checkpoint may have 40 000 matrices.
    CheckpointError names a bad pattern."""
    wildcards = [translate(pattern) for pattern in patterns if not pattern.startswith("re:") and "*" in pattern]
    if wildcards:
        found = [re.compile("|".join(wildcards))]
    else:
        found = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                found.append(re.compile(pattern.removeprefix("re:")))
            except re.error as error:
                raise CheckpointError(f"quantization_config: {pattern} is no regular expression: {error}") from error
    return tuple(found)
