"""WAV files of every kind, and tones."""

import struct

import numpy as np

from deploy.edge.media.audio_features import RATE, Array


def wav(samples: Array, bits: int = 16, rate: int = RATE, *, code: int = 1, extensible: bool = False) -> bytes:
    """A file of float samples [n] or [n, channels]."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    if code == 3:
        data = samples.astype("<f4" if bits == 32 else "<f8").tobytes()
    else:
        steps = np.round(samples.astype(np.float64) * 2 ** (bits - 1)).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype("<i4")
        data = (steps + 128).astype("u1").tobytes() if bits == 8 else steps.reshape(-1, 1).view("u1")[:, : bits // 8].tobytes()
    whole = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * whole, whole, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, code) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = [(b"LIST", b"oddly"), (b"fmt ", form), (b"data", data)]
    body = b"".join(name + struct.pack("<I", len(chunk)) + chunk + b"\0" * (len(chunk) % 2) for name, chunk in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def tone(rate: int, hertz: float, seconds: float = 1.0) -> Array:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)
