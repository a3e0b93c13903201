"""Makes dequant.bin: random blocks of every weight type, and the floats that the published ggml block layouts give.

For each type, little-endian: uint32 GGUF type, elements, bytes; the blocks' bytes; float32 values. Written with numpy from
the layouts alone, independently of backends/cpu. Run: python3 tests/reference/dequant.py
"""

import pathlib

import numpy as np

rng = np.random.default_rng(20261121)


def half_bytes(n):
    """n finite halves as bytes [n][2]: small scales, negative ones and subnormals among them."""
    h = (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 1, n)).astype("<f2")
    return h.view(np.uint8).reshape(n, 2)


def half(b):
    """bytes [n][2] to float32 [n][1]."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def nibbles(q):
    """bytes [n][16] to [n][32]: low halves first."""
    return np.concatenate([q & 15, q >> 4], axis=1).astype(np.float32)


def fifth_bits(b):
    """bytes [n][4] to [n][32] bits, lowest first."""
    return np.unpackbits(b, axis=1, bitorder="little").astype(np.float32)


def raw(n, size):
    return rng.integers(0, 256, (n, size), dtype=np.uint8)


def f32(n):
    b = rng.standard_normal(n).astype("<f4").view(np.uint8).reshape(n, 4)
    return b, b.view("<f4")


def f16(n):
    b = half_bytes(n)
    b[:4] = np.array([0x0001, 0x8000, 0x7C00, 0xFBFF], "<u2").view(np.uint8).reshape(4, 2)
    return b, half(b)


def bf16(n):
    values = rng.standard_normal(n).astype("<f4") * np.float32(1e30)
    b = np.ascontiguousarray(values.view(np.uint8).reshape(n, 4)[:, 2:])
    return b, (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def q8_0(n):
    d, q = half_bytes(n), raw(n, 32)
    return np.hstack([d, q]), half(d) * q.view(np.int8).astype(np.float32)


def q4_0(n):
    d, q = half_bytes(n), raw(n, 16)
    return np.hstack([d, q]), half(d) * (nibbles(q) - 8)


def q4_1(n):
    d, m, q = half_bytes(n), half_bytes(n), raw(n, 16)
    return np.hstack([d, m, q]), half(d) * nibbles(q) + half(m)


def q5_0(n):
    d, h, q = half_bytes(n), raw(n, 4), raw(n, 16)
    return np.hstack([d, h, q]), half(d) * (nibbles(q) + 16 * fifth_bits(h) - 16)


def q5_1(n):
    d, m, h, q = half_bytes(n), half_bytes(n), raw(n, 4), raw(n, 16)
    return np.hstack([d, m, h, q]), half(d) * (nibbles(q) + 16 * fifth_bits(h)) + half(m)


def k_scales(s):
    """12 bytes [n][12] to 8 scales and 8 minima [n][8]."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = np.hstack([a & 63, (c & 15) | (a >> 6) << 4])
    least = np.hstack([b & 63, (c >> 4) | (b >> 6) << 4])
    return scale.astype(np.float32), least.astype(np.float32)


def k_values(d, m, s, q):
    """q [n][8][32]."""
    scale, least = k_scales(s)
    return ((half(d) * scale)[:, :, None] * q - (half(m) * least)[:, :, None]).reshape(len(d), 256)


def k_nibbles(q):
    """bytes [n][128] to [n][8][32]: 32 bytes hold groups 2i (low) and 2i + 1 (high)."""
    q = q.reshape(-1, 4, 32)
    return np.stack([q & 15, q >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)


def q4_k(n):
    d, m, s, q = half_bytes(n), half_bytes(n), raw(n, 12), raw(n, 128)
    return np.hstack([d, m, s, q]), k_values(d, m, s, k_nibbles(q))


def q5_k(n):
    d, m, s, h, q = half_bytes(n), half_bytes(n), raw(n, 12), raw(n, 32), raw(n, 128)
    fifth = np.stack([(h >> g) & 1 for g in range(8)], axis=1).astype(np.float32)
    return np.hstack([d, m, s, h, q]), k_values(d, m, s, k_nibbles(q) + 16 * fifth)


def q6_k(n):
    low, high, s, d = raw(n, 128), raw(n, 64), raw(n, 16), half_bytes(n)
    q = np.empty((n, 256), np.uint8)
    for half_block in range(2):
        l, h = low[:, 64 * half_block :], high[:, 32 * half_block :]
        for i in range(32):
            o = 128 * half_block + i
            q[:, o] = (l[:, i] & 15) | (h[:, i] & 3) << 4
            q[:, o + 32] = (l[:, i + 32] & 15) | (h[:, i] >> 2 & 3) << 4
            q[:, o + 64] = l[:, i] >> 4 | (h[:, i] >> 4 & 3) << 4
            q[:, o + 96] = l[:, i + 32] >> 4 | (h[:, i] >> 6) << 4
    scale = half(d) * s.view(np.int8).astype(np.float32)
    values = np.repeat(scale, 16, axis=1) * (q.astype(np.float32) - 32)
    return np.hstack([low, high, s, d]), values


TYPES = [(0, f32, 37), (1, f16, 37), (2, q4_0, 4), (3, q4_1, 4), (6, q5_0, 4), (7, q5_1, 4), (8, q8_0, 4),
         (12, q4_k, 3), (13, q5_k, 3), (14, q6_k, 3), (30, bf16, 37)]

out = bytearray()
for gguf_type, make, blocks in TYPES:
    data, values = make(blocks)
    data, values = np.ascontiguousarray(data), np.ascontiguousarray(values, "<f4")
    out += np.array([gguf_type, values.size, data.size], "<u4").tobytes() + data.tobytes() + values.tobytes()
pathlib.Path(__file__).with_suffix(".bin").write_bytes(out)
