"""The memory arithmetic of the KV cache. No torch."""

from collections.abc import Sequence
from pathlib import Path

from engine.audio_geometry import AudioGeometry
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import ITEMSIZE, Geometry, KVGroup, Layer, shard_kv_heads, vocab_share
from engine.logit_adjustments import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_BIAS_IDS
from engine.media_geometry import MediaGeometry
from engine.plan import DEPTH
from engine.quantisation import read_quantisation
from engine.step_shapes import buckets, sequence_rows
from engine.vision_geometry import CELL, LARGEST_PICTURE, SIDE

PIECE_LOGITS = 1 << 24  # logits of a rank's share, fp32, that filters and logprobs process at once
PIECES = 5  # tensors of PIECE_LOGITS logits alive at once: the rows', sent, received, scaled, padding
CACHED_TOKENS = 8192  # of a conversation, as the pools are sized for
INBOX_BUFFERS = 5  # parts that may wait to be read: `kernels.fused_allreduce_norm.BUFFERS`
INBOX_BYTES = 512 << 20  # that a rank's inboxes for all-reduces may take; sums of more rows are collectives
CPU_BYTES = 1 << 30  # of a whole group, where the device is the machine's own memory
ENCODER_ROWS = 4096  # soft tokens that encoders make at once; one picture may give more
CAPTURED_PATCHES = 5184  # of pictures, whose layers are captured
ENCODER_CACHE_BYTES = 256 << 20  # of encoders' outputs that a rank keeps


def kv_budget(config: EngineConfig, total: int, used: int) -> int:
    """A part of CPU_BYTES on a CPU; on a GPU, with `used` of `total` bytes taken, what
    `memory_fraction` leaves without `reserved_bytes`, perhaps below zero."""
    if config.device == "cpu":
        return CPU_BYTES // config.tp
    return int(total * config.memory_fraction) - used - reserved_bytes(config)


def reserved_bytes(config: EngineConfig) -> int:
    """What a rank takes on a GPU after its pools are sized: for sampling, encoders, and unpacked int4 weights."""
    sampling = sampling_bytes(config.max_seqs, config.geometry.vocab, config.tp, config.widest) + unpacked_bytes(config)
    encoders = config.media.values()
    activations = max((encoder_row_bytes(encoder, ITEMSIZE[config.dtype]) for encoder in encoders), default=0)
    rows = ENCODER_ROWS + CAPTURED_PATCHES // CELL**2
    return sampling + (rows * activations + ENCODER_CACHE_BYTES if activations else 0)


def unpacked_bytes(config: EngineConfig) -> int:
    """The largest int4 matrix in the dtype of activations, since products of many rows unpack one at a time. Experts are not
    unpacked."""
    if "int4" not in read_quantisation(Path(config.model), config.weights).name:
        return 0
    geometry = config.geometry

    def rows(layer: Layer) -> int:
        kv_heads = len(shard_kv_heads(geometry.heads, layer.kv_heads, config.tp, 0))
        qkv = (geometry.heads // config.tp + 2 * kv_heads) * layer.head_dim
        return max(qkv, 2 * layer.intermediate // config.tp)

    return max(map(rows, geometry.layers)) * geometry.hidden * ITEMSIZE[config.dtype]


def inbox_rows(config: EngineConfig, geometry: Geometry) -> int:
    """Most rows of a step that are summed over inboxes: all decode rows, and prompts' with sequence
    parallelism."""
    own = sequence_rows(config, geometry)
    if own.stop:
        most = min(own.start, own.stop) - 1
    else:
        most = buckets(config.max_seqs)[-1] * config.widest
    return min(most, INBOX_BYTES // _inbox_row_bytes(config, geometry))


def _inbox_row_bytes(config: EngineConfig, geometry: Geometry) -> int:
    return INBOX_BUFFERS * (config.tp + 1) * geometry.summed_width * ITEMSIZE[config.dtype]


def exchange_bytes(config: EngineConfig, geometry: Geometry) -> int:
    """As `AllReduceInbox.bytes` and `SequenceParallel.bytes`."""
    if config.tp == 1:
        return 0
    rows = sequence_rows(config, geometry)
    if rows:
        own = (2 * config.tp - 1) * rows[-1] // config.tp * geometry.hidden * ITEMSIZE[config.dtype]
    else:
        own = 0
    return inbox_rows(config, geometry) * _inbox_row_bytes(config, geometry) + own


def encoder_row_bytes(encoder: MediaGeometry, itemsize: int) -> int:
    """Peak of a soft token, in fp32."""
    if isinstance(encoder, AudioGeometry):
        return 4 * encoder.features * (encoder.unified or 4) + 4 * encoder.hidden * (3 * encoder.reach + 8) * (not encoder.unified)
    width = 4 * (encoder.hidden + encoder.layers[0].intermediate) * itemsize + 8 * encoder.hidden
    return max(CELL**2 * width, 12 * 3 * SIDE**2)


def sampling_bytes(max_seqs: int, vocab: int, tp: int, width: int = 1) -> int:
    """`adjustment_bytes`; three copies of a step's logits, `width` rows a sequence (captured, eager, originals for logprobs);
    PIECES of logits."""
    logits = 4 * buckets(max_seqs)[-1] * width * vocab_share(vocab, tp)
    return adjustment_bytes(max_seqs, vocab, tp, width) + 3 * logits + 4 * PIECES * PIECE_LOGITS


def adjustment_bytes(max_seqs: int, vocab: int, tp: int, width: int = 1) -> int:
    """`kernels.sampling_batch.SlotAdjustments`."""
    share = vocab_share(vocab, tp)
    words = max(((rank + 1) * share - 1 >> 5) - (rank * share >> 5) + 1 for rank in range(tp))
    counts, masks = 2 * share, (1 + width) * 4 * words  # a count of each id; what may come always, and at each token of a step
    return (max_seqs + 1) * (counts + masks + 4 * (2 * MAX_BIAS_IDS + MAX_BAD_WORD_IDS + MAX_BAD_WORDS + 8))


def pages_of(config: EngineConfig, kv_bytes: int) -> tuple[int, ...]:
    """Pages as configured, else what fits `kv_bytes`, the least of any rank. ConfigError: too little."""
    if kv_bytes < 0:
        raise ConfigError(
            f"weights do not fit: they, and what is reserved for sampling and encoders, take {-kv_bytes / 2**30:.2f} GiB more of a "
            f"GPU than memory_fraction {config.memory_fraction:g} allows at tp {config.tp}; raise either, or lower max_seqs"
        )
    groups = config.kv_groups
    pages = config.pages or pool_pages(config, groups, kv_bytes)
    taken = sum(count * group.page_bytes for group, count in zip(groups, pages, strict=True))
    if taken > kv_bytes:
        raise ConfigError(f"pages take {taken / 2**30:.2f} GiB of a rank, which has {kv_bytes / 2**30:.2f} GiB for them")
    return pages


def longest_sequence(groups: Sequence[KVGroup], pages: Sequence[int]) -> int:
    """Tokens of the longest sequence that the pools hold alone: full attention decides; the last token needs no page."""
    return (pages[-1] - 1) * groups[-1].page + 1


def pool_pages(config: EngineConfig, groups: Sequence[KVGroup], bytes_available: int) -> tuple[int, ...]:
    """Pages of each group on one rank, null page included. ConfigError with the numbers.

    A sliding group gets what all slots and plans in flight can hold, and a window for each cached conversation; a full group the
    rest, at most `max_seqs` sequences of `max_len`.
    """
    *sliding, full = groups
    spent = sum(_sliding_pages(group, config) * group.page_bytes for group in sliding)
    left = bytes_available - spent
    if left < 2 * full.page_bytes:
        raise ConfigError(
            f"the KV cache does not fit: {bytes_available / 2**20:.1f} MiB are available for it, the windows of {config.max_seqs} "
            f"sequences (max_seqs) and {DEPTH} x prefill_budget take {spent / 2**20:.1f} MiB, and full attention needs "
            f"{2 * full.page_bytes / 2**20:.1f} MiB at least; lower max_seqs or prefill_budget, or raise tp or memory_fraction"
        )
    # Reserve one cached window per conversation, up to `max_seqs`: full pages are found only up to a place with a window before it,
    # so the cache would be worth nothing whenever all slots run.
    slots = config.max_seqs
    tails = sum(_window_pages(group) * group.page_bytes for group in sliding)
    usual = -(-min(config.max_len, CACHED_TOKENS) // full.page) * full.page_bytes
    if config.prefix_cache:
        cached = max(0, min(slots, (left - slots * usual) // (tails + usual)))
    else:
        cached = 0
    most = (slots + cached) * -(-config.max_len // full.page) + 1
    pages = (_sliding_pages(group, config) + cached * _window_pages(group) for group in sliding)
    return *pages, min(most, (left - cached * tails) // full.page_bytes)


def _sliding_pages(group: KVGroup, config: EngineConfig) -> int:
    """Pages for the windows of all slots, prompts of plans in flight (held until their results are in), and the null page; never
    fewer than the largest picture takes."""
    assert group.window is not None
    window = -(-(group.window + 1) // group.page) + 1
    limit = config.max_seqs * -(-config.max_len // group.page) + 1
    pages = min(config.max_seqs * window + DEPTH * -(-config.prefill_budget // group.page) + 1, limit)
    if group.bidirectional:
        return max(pages, group.span_pages(LARGEST_PICTURE) + 1)
    return pages


def _window_pages(group: KVGroup) -> int:
    assert group.window is not None
    return -(-(group.window - 1) // group.page)
