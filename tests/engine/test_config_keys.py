"""What a config.json may say: every key is read, held to what is implemented, or known to change nothing here."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4Config, Gemma4TextConfig, Gemma4UnifiedConfig, Gemma4UnifiedTextConfig, PreTrainedConfig

from engine import geometry
from engine.errors import CheckpointError
from engine.geometry import IMPLEMENTED, parse_config, read_geometry
from engine.vision_geometry import read_vision
from tests.nano.model_shapes import config
from tests.nano.nano_shapes import SHAPES

pytestmark = pytest.mark.cpu

# Of the text part: training, generation, serialisation, and what transformers' own runtime does.
HARMLESS = {"attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "use_cache"}
# Of the whole: ids of media that text never embeds (placeholders are read), and towers, whose tensors are skipped.
HARMLESS_OUTER = {
    "audio_config", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id", "initializer_range",
    "vision_config",
}  # fmt: skip


class Recorded(dict[str, Any]):
    """A config that knows which of its keys were asked for."""

    def __init__(self, values: dict[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self._asked = asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a mapping's."""
        self._asked.add(key)
        return super().get(key, default)


def raw(member: str) -> dict[str, Any]:
    return json.loads(json.dumps(config(SHAPES[member], "bfloat16")))


def read_keys() -> tuple[set[str], set[str]]:
    """(keys of the text part, keys of the whole) that the geometry is made of, over all members."""
    text = set()
    outer = set()
    for member in SHAPES:
        whole = raw(member)
        whole["text_config"] = Recorded(whole["text_config"], text)
        parse_config(Recorded(whole, outer))
        parse_config(whole["text_config"])
    return text - set(IMPLEMENTED), outer


def fields(kind: type[PreTrainedConfig]) -> set[str]:
    """Every key that transformers knows of such a config, and of no other: declared, or taken from what a file says."""

    def keys(each: type[PreTrainedConfig]) -> set[str]:
        return {*each().to_dict(), *re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(each.__post_init__))}

    return keys(kind) - keys(PreTrainedConfig)


def unknown(kind: type[PreTrainedConfig], *known: set[str]) -> set[str]:
    return fields(kind) - set().union(*known)


@pytest.mark.parametrize("kind", [Gemma4TextConfig, Gemma4UnifiedTextConfig])
def test_every_key_of_the_text_part_is_known(kind: type[PreTrainedConfig]) -> None:
    """Each of transformers' fields is read, implemented for some values, or harmless; with one forgotten, it is named."""
    read, _ = read_keys()
    assert unknown(kind, read, set(IMPLEMENTED), HARMLESS) == set()
    assert unknown(kind, read, set(IMPLEMENTED) - {"hidden_activation"}, HARMLESS) == {"hidden_activation"}
    assert not read & HARMLESS


@pytest.mark.parametrize("kind", [Gemma4Config, Gemma4UnifiedConfig])
def test_every_key_of_the_whole_is_known(kind: type[PreTrainedConfig]) -> None:
    """The same of the config around it."""
    _, read = read_keys()
    assert unknown(kind, read, HARMLESS_OUTER) == set()
    assert unknown(kind, read - {"image_token_id"}, HARMLESS_OUTER) == {"image_token_id"}


def refusal(edit: Callable[[dict[str, Any]], None], member: str = "31b") -> str:
    broken = raw(member)
    edit(broken["text_config"])
    with pytest.raises(CheckpointError) as error:
        parse_config(broken)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "silu"),
        ("hidden_act", "gelu"),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 128),
        ("attention_bias", True),
        ("rope_scaling", {"factor": 8.0, "rope_type": "linear"}),
        ("use_bidirectional_attention", "all"),
    ],
)
def test_other_mathematics_is_refused(key: str, value: Any) -> None:
    """A value that is not implemented is refused by its key; the implemented ones are accepted."""
    message = refusal(lambda text: text.update({key: value}))
    assert f"config.json: {key} {value!r} is not implemented, only " in message
    for right in IMPLEMENTED[key]:
        accepted = raw("31b")
        accepted["text_config"][key] = right
        both_ways = accepted["text_config"]["use_bidirectional_attention"] is not None
        assert parse_config(accepted) == replace(parse_config(raw("31b")), bidirectional=both_ways)


def test_a_section_of_wrong_types_is_refused(tmp_path: Path) -> None:
    """Text where numbers belong, in the encoder's part of config.json, is an error that names file and section."""
    broken = raw("31b")
    broken["vision_config"]["head_dim"] = "72"
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match=r"config\.json: vision_config: "):
        read_vision(tmp_path)


def test_all_wrong_keys_are_named_at_once() -> None:
    """Two wrong keys are named in one error."""
    message = refusal(lambda text: text.update(hidden_activation="silu", attn_logit_softcapping=50.0))
    assert "hidden_activation 'silu'" in message
    assert "attn_logit_softcapping 50.0" in message


def test_a_default_rope_is_whole_and_unscaled() -> None:
    """A default rope rotates all pairs whatever partial_rotary_factor says, as transformers does, and takes no factor."""

    def scaled(text: dict[str, Any]) -> None:
        text["rope_parameters"]["sliding_attention"]["factor"] = 8.0

    assert "factor 8 is not implemented with rope_type 'default'" in refusal(scaled)
    partial = raw("31b")
    partial["text_config"]["rope_parameters"]["sliding_attention"] |= {"partial_rotary_factor": 0.25, "factor": 1.0}
    assert parse_config(partial) == parse_config(raw("31b"))
    assert parse_config(partial).layers[0].rope.pairs == 128
    stretched = raw("31b")
    stretched["text_config"]["rope_parameters"]["full_attention"]["factor"] = 8.0
    assert parse_config(stretched).layers[-1].rope.factor == 8.0


def test_the_last_layer_is_full_whatever_is_listed() -> None:
    """transformers makes the last layer a full one, with a full layer's heads; so do we."""
    listed = raw("31b")
    listed["text_config"]["layer_types"][-1] = "sliding_attention"
    assert parse_config(listed) == parse_config(raw("31b"))
    assert Gemma4TextConfig(**listed["text_config"]).layer_types[-1] == "full_attention"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"5": {"head_dim": 512, "intermediate_size": 7}}, "intermediate_size of layer 5 is not implemented"),
        ({"5": {"head_dim": 512, "skip": ["mlp"]}}, "skip of layer 5 is not implemented"),
        ({"6": {"head_dim": 512}}, "any key of layer 6 is not implemented"),
        ({"5": {"head_dim": 512}, "1": {"head_dim": 128}}, "sliding layers differ in"),
    ],
)
def test_overrides_of_single_layers_are_refused(overrides: dict[str, Any], message: str) -> None:
    """per_layer_config may give heads by kind of layer, and nothing else; a value that all layers have is no override."""

    def edit(text: dict[str, Any]) -> None:
        text["per_layer_config"] = overrides

    assert f"per_layer_config: {message}" in refusal(edit)
    same = raw("31b")
    same["text_config"]["per_layer_config"] = {"5": {"head_dim": 512, "sliding_window": same["text_config"]["sliding_window"]}}
    assert parse_config(same) == parse_config(raw("31b"))


def test_a_short_per_layer_table_is_refused() -> None:
    """A per-layer table with fewer rows than the vocabulary has ids is refused; without such a table it is nothing."""

    def edit(text: dict[str, Any]) -> None:
        text["vocab_size_per_layer_input"] = 512

    assert "vocab_size_per_layer_input (512) is below vocab_size (1024)" in refusal(edit, "e2b")
    bare = raw("31b")
    edit(bare["text_config"])
    assert parse_config(bare).ple == 0


W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 16}, "input_activations": None}},
}


@pytest.mark.parametrize(
    ("file", "written", "name"),
    [
        ("config.json", {"quantization_config": W4A16}, "compressed-tensors, 4-bit int group of 16 weights"),
        ("config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}, "modelopt, MXFP8"),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("config.json", {"quantization_config": {"load_in_4bit": True}}, "an unnamed format"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "W4A8_AWQ"}}, "modelopt, W4A8_AWQ"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_its_format(tmp_path: Path, file: str, written: dict[str, Any], name: str) -> None:
    """One line names the format; without it the same folder is read."""
    (tmp_path / "config.json").write_text(json.dumps(raw("e2b")))
    assert read_geometry(tmp_path) == parse_config(raw("e2b"))
    (tmp_path / file).write_text(json.dumps((raw("e2b") if file == "config.json" else {}) | written))
    with pytest.raises(CheckpointError, match=re.escape(f"is quantised ({name}); Quartet loads bf16")) as found:
        read_geometry(tmp_path)
    assert str(found.value).endswith("W4A16 int4 (groups 32, 64, 128)")


def test_a_gguf_folder_is_refused_by_its_format(tmp_path: Path) -> None:
    """It has no config.json; without the file only that is said."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_geometry(tmp_path)
    (tmp_path / "gemma-4-31b-q4_0.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds GGUF weights only \(gemma-4-31b-q4_0\.gguf\)"):
        read_geometry(tmp_path)


@pytest.mark.parametrize("key", ["head_dim", "global_head_dim", "rope_parameters"])
def test_a_key_that_is_left_out_has_transformers_default(key: str) -> None:
    """The published shapes have these values, so without the key nothing changes; another value would."""
    left_out, other = raw("31b"), raw("31b")
    whole = parse_config(raw("31b"))
    del left_out["text_config"][key]
    assert parse_config(left_out) == whole
    ropes = {kind: {"rope_type": "default", "rope_theta": 5.0} for kind in ("sliding_attention", "full_attention")}
    other["text_config"][key] = {"head_dim": 128, "global_head_dim": 256, "rope_parameters": ropes}[key]
    assert parse_config(other) != whole


def test_the_defaults_are_transformers() -> None:
    """Of a text config without any key: head_dim and rotary embedding of both kinds."""
    published = Gemma4TextConfig().to_dict()
    assert published["head_dim"] == geometry._HEAD_DIM
    assert published["rope_parameters"] == geometry._ROPES
