"""Which format each matrix of a checkpoint has: read once from config.json, or hf_quant_config.json. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from engine.checkpoint import read_optional, tensor_names
from engine.errors import CheckpointError
from engine.protocol import JsonObject
from engine.weight_formats import FORMATS, PLAIN, WeightFormat

_ALL = "Linear"  # a target: every matrix
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Quantisation:
    """A format for each matrix of a checkpoint.

    groups   targets and the format of matrices that one of them names: names, patterns (`re:`), `*`, or all (`Linear`)
    ignored  names and patterns of plain matrices
    fused    the experts of a layer are one tensor; else there is one for each expert
    """

    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...] = ()
    ignored: tuple[str, ...] = ()
    fused: bool = True

    def format_of(self, matrix: str) -> WeightFormat:
        """The format of a matrix by its published name, without `.weight`."""
        if _names(self.ignored, matrix):
            return PLAIN
        return next((weights for targets, weights in self.groups if _ALL in targets or _names(targets, matrix)), PLAIN)


UNQUANTISED = Quantisation()


def read_quantisation(folder: Path, setting: str = "auto") -> Quantisation:
    """The formats of the folder's matrices. setting: `auto`, or the name of the format that is wanted.

    CheckpointError: no format reads the folder's, or it is not the one that is wanted.
    """
    config = read_optional(folder / "config.json")
    settings = _settings(folder, config)
    fused = not (_has_experts(config) and any(_ONE_EXPERT.search(name) for name in tensor_names(folder)))
    wanted, *_ = FORMATS.get(setting, (PLAIN,))
    if settings is None:
        if wanted is PLAIN and setting in ("auto", "plain"):
            return Quantisation(fused=fused)
        if wanted.packer is not None:
            return Quantisation((((_ALL,), wanted._replace(at_load=True)),), fused=fused)
        raise CheckpointError(f"{folder}: this checkpoint is not quantised; Quartet loads {setting} weights")
    ignored = tuple(settings.get("ignore") or settings.get("exclude_modules") or ())
    groups = tuple((targets, _format(folder, scheme, setting)) for targets, scheme in _schemes(settings))
    return Quantisation(groups, ignored, fused)


def _format(folder: Path, scheme: str, setting: str) -> WeightFormat:
    """The format that reads a scheme, if the setting allows it."""
    name, found = next(
        ((name, one) for name, formats in FORMATS.items() for one in formats if scheme in one.schemes), (None, PLAIN)
    )
    if name is None or setting not in ("auto", name):
        loaded = "bf16, fp16 and fp32 weights" if setting in ("auto", "plain") else f"{setting} weights"
        if name is None and setting == "auto":
            known = [f"({scheme})" for formats in FORMATS.values() for one in formats for scheme in one.schemes]
            loaded = ", ".join([loaded, *known])
        raise CheckpointError(f"{folder}: this checkpoint is quantised ({scheme}); Quartet loads {loaded}")
    return found


def _settings(folder: Path, config: JsonObject) -> JsonObject | None:
    """What the folder says of its quantisation; None: it is not quantised."""
    said = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if said is None and (modelopt := read_optional(folder / "hf_quant_config.json")):
        said = {"quant_method": "modelopt", **(modelopt.get("quantization") or {})}
    return said


def _has_experts(config: JsonObject) -> bool:
    return bool((config.get("text_config") or config).get("num_experts"))


def _schemes(settings: JsonObject) -> Iterable[tuple[tuple[str, ...], str]]:
    """Targets and the name of the scheme of each group of matrices."""
    method = str(settings.get("quant_method") or "an unnamed format")
    groups = settings.get("config_groups") or {}
    if method == "compressed-tensors":
        for group in groups.values():
            parts = [f"{_scheme(group.get('weights') or {})} weights"]
            if group.get("input_activations"):
                parts.append(f"{_scheme(group['input_activations'])} activations")
            yield tuple(group.get("targets") or (_ALL,)), ", ".join([method, *parts])
    else:
        yield (_ALL,), ", ".join(filter(None, (method, settings.get("quant_algo"))))


def _scheme(numbers: JsonObject) -> str:
    """A kind of numbers in words: `8-bit float channel`, `4-bit int group of 32 asymmetric`, `8-bit float token dynamic`."""
    strategy = numbers.get("strategy") or ("group" if numbers.get("group_size") else "tensor")  # the defaults of compressed-tensors
    words = [f"{numbers.get('num_bits')}-bit", str(numbers.get("type")), strategy]
    if numbers.get("group_size") and strategy in ("group", "tensor_group"):
        words.append(f"of {numbers['group_size']}")
    if numbers.get("block_structure"):
        words.append("x".join(map(str, numbers["block_structure"])))
    if numbers.get("symmetric") is False:
        words.append("asymmetric")
    if numbers.get("dynamic"):
        words.append("dynamic")
    return " ".join(words)


def _names(patterns: tuple[str, ...], matrix: str) -> bool:
    regular = [pattern.removeprefix("re:") for pattern in patterns if pattern.startswith("re:")]
    plain = [pattern for pattern in patterns if not pattern.startswith("re:")]
    return any(re.match(pattern, matrix) for pattern in regular) or any(fnmatchcase(matrix, pattern) for pattern in plain)
