"""The family's shapes: what config.json says, per layer, per KV group, per rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.geometry import KVGroup, check_tp, kv_groups, parse_config, read_geometry, shard_kv_heads, shard_vocab, vocab_share
from tests.nano.model_shapes import config
from tests.nano.nano_shapes import SHAPES

pytestmark = pytest.mark.pure


def raw(member: str) -> dict[str, Any]:
    return json.loads(json.dumps(config(SHAPES[member], "bfloat16")))


@pytest.mark.parametrize("member", SHAPES)
def test_layers_follow_the_member(member: str) -> None:
    """Every layer's kind, head dim, KV heads, MLP width and KV producer are those of the shape it was built from."""
    shape, geometry = SHAPES[member], parse_config(raw(member))
    for layer in geometry.layers:
        full = shape.is_full(layer.index)
        assert (layer.kind == "full", layer.head_dim, layer.kv_heads) == (full, shape.head_dim(layer.index), shape.kv(layer.index))
        assert layer.intermediate == shape.mlp_width(layer.index)
        assert layer.owns_kv != shape.is_shared(layer.index)
        assert layer.rope.pairs == (64 if full else 128)
        producer = geometry.layers[layer.kv_source]
        assert producer.owns_kv
        assert producer.kind == layer.kind


@pytest.mark.parametrize("member", SHAPES)
def test_both_layouts_of_config_are_read_alike(member: str) -> None:
    """The layout that transformers writes back (per_layer_config, no global_* keys) gives the same geometry."""
    public = raw(member)
    saved = raw(member)
    text = saved["text_config"]
    shape = SHAPES[member]
    text.pop("global_head_dim")
    text.pop("num_global_key_value_heads", None)
    full = [layer for layer in range(shape.layers) if shape.is_full(layer)]
    text["per_layer_config"] = {str(i): {"head_dim": 512, "num_key_value_heads": shape.kv(i)} for i in full}
    assert parse_config(saved) == parse_config(public)


@pytest.mark.parametrize("member", SHAPES)
def test_images_are_seen_both_ways_in_sliding_layers(member: str) -> None:
    """Of the 12B, 26B and 31B, not of E2B and E4B; the 12B's config says so where it says nothing, the others' does not."""
    both_ways = member not in {"e2b", "e4b"}
    groups = kv_groups(parse_config(raw(member)), 1)
    assert [group.bidirectional for group in groups] == [group.name == "sliding" and both_ways for group in groups]
    silent = raw(member)
    del silent["text_config"]["use_bidirectional_attention"]
    assert parse_config(silent).bidirectional == (member == "12b")


def test_groups_hold_the_layers_that_own_kv() -> None:
    """E2B shares KV: its groups hold the producers only, and replicate the one KV head on every rank."""
    groups = kv_groups(parse_config(raw("e2b")), 4)
    assert [(group.name, group.layers, group.kv_heads, group.head_dim) for group in groups] == [
        ("sliding", (0, 1), 1, 256),
        ("full", (2,), 1, 512),
    ]


@pytest.mark.parametrize(("heads", "kv", "tp"), [(32, 16, 4), (32, 4, 4), (16, 2, 4), (16, 1, 4), (8, 2, 8), (8, 1, 1)])
def test_every_query_head_finds_its_kv_head_on_its_rank(heads: int, kv: int, tp: int) -> None:
    """Query head j reads KV head j * kv // heads, and the rank that has the one has the other."""
    share = heads // tp
    for rank in range(tp):
        held = shard_kv_heads(heads, kv, tp, rank)
        for local in range(share):
            assert held[local * len(held) // share] == (rank * share + local) * kv // heads


@given(st.integers(2, 200), st.sampled_from([16, 32, 64]), st.integers(1, 600))
def test_worst_pages_is_the_worst(window: int, page: int, tokens: int) -> None:
    """worst_pages is what the greediest single position of a sequence needs: no fewer, no more."""
    group = KVGroup(0, "sliding", (0,), 1, 256, window, page)
    assert group.worst_pages(tokens) >= max(len(group.pages_for(p, p + 1)) for p in range(tokens))
    long = max(len(group.pages_for(p, p + 1)) for p in range(4 * page + 4 * window))
    assert group.worst_pages(10**6) == long


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"text_config": {"hidden_size": None}}, "hidden_size"),
        ({"text_config": {"layer_types": ["sliding_attention"]}}, "layer_types has 1 entries"),
        ({"text_config": {"layer_types": ["linear"] * 6}}, "unknown layer type 'linear'"),
        ({"text_config": {"rope_parameters": {"full_attention": "x", "sliding_attention": "x"}}}, "config.json: 'str' object"),
        ({"text_config": {"num_kv_shared_layers": -1}}, "config.json: list index out of range"),
        ({"text_config": "x"}, "config.json: 'str' object"),
    ],
)
def test_a_config_that_cannot_be_read_says_what_is_wrong(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Missing keys, unknown values and what is of another kind are told with the file."""
    broken = raw("31b")
    for key, value in change.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                broken["text_config"].pop(name)
                if inner is not None:
                    broken["text_config"][name] = inner
        else:
            broken[key] = value
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match=message):
        read_geometry(tmp_path)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    """A folder that is no checkpoint gives an error with its path."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_geometry(tmp_path)


@pytest.mark.parametrize(("tp", "message"), [(3, "attention heads"), (16, "attention heads")])
def test_sizes_that_do_not_divide_are_named(tp: int, message: str) -> None:
    """A TP size that does not divide the model is refused by name."""
    with pytest.raises(CheckpointError, match=message):
        check_tp(parse_config(raw("31b")), tp)


def test_a_vocabulary_is_shared_by_any_number_of_ranks() -> None:
    """Every row has one owner and a place in its owner's share; shares are even where they can be, else of whole cache lines."""
    for rows, tp in ((262144, 4), (262145, 4), (1061, 4), (40, 8), (7, 1)):
        shards = [shard_vocab(rows, tp, rank) for rank in range(tp)]
        share = vocab_share(rows, tp)
        assert [row for shard in shards for row in shard] == list(range(rows))
        assert all(rank * share <= shard.start and len(shard) <= share for rank, shard in enumerate(shards) if shard)
        assert share == rows // tp if rows % tp == 0 else share % 32 == 0
