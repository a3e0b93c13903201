"""Makes dequant.bin: random blocks of every weight type, and the floats that the published ggml block layouts give.

For each type, little-endian: uint32 GGUF type, elements, bytes; the blocks' bytes; float32 values. Written with numpy from
the layouts alone, independently of backends/cpu, with which it shares the numbers of the code books alone (dequant_test
compares these with the published ones). Run: python3 tests/reference/dequant.py
"""

import pathlib
import re

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


# The types below: a block after another and an element after another, as the layouts are published.


def codebook(name):
    """A list of numbers of backends/codebooks.h."""
    text = (pathlib.Path(__file__).parents[2] / "backends/codebooks.h").read_text().replace("\\\n", "")
    numbers = re.search(rf"#define THIMBLE_{name} (.*)", text)[1]
    return [int(n, 0) for n in numbers.split(",")]


def grid(name, values, bits):
    """A book as lists of numbers, one an entry."""
    entries = codebook(name + "_GRID")
    return [[values[entry >> bits * i & (1 << bits) - 1] for i in range(16 // bits)] for entry in entries]


IQ2_VALUES, IQ4_VALUES, FP4_VALUES = codebook("IQ2_VALUES") + [0], codebook("IQ4_VALUES"), codebook("FP4_VALUES")
GRIDS = {
    "iq2_xxs": grid("IQ2_XXS", IQ2_VALUES, 2),
    "iq2_xs": grid("IQ2_XS", IQ2_VALUES, 2),
    "iq2_s": grid("IQ2_S", IQ2_VALUES, 2),
    "iq3_xxs": grid("IQ3_XXS", codebook("IQ3_XXS_VALUES") + 8 * [0], 4),
    "iq3_s": grid("IQ3_S", codebook("IQ3_S_VALUES") + 8 * [0], 4),
    "iq1": grid("IQ1", [-1, 0, 1, 0], 2),
}


def u16(b, at):
    return int(b[at]) | int(b[at + 1]) << 8


def u32(b, at):
    return u16(b, at) | u16(b, at + 2) << 16


def half_of(b, at):
    return float(b[at : at + 2].view("<f2")[0])


def sign(mask, j):
    return -1 if mask >> j & 1 else 1


def even_sign(seven, j):
    """Eight signs of which the last makes the number of minuses even."""
    return sign(seven | (bin(seven).count("1") % 2) << 7, j)


def pairs_of_bits(q, e):
    """Element e of 256 that have two bits each."""
    return int(q[32 * (e // 128) + e % 32]) >> 2 * (e % 128 // 32) & 3


def nibble(b, at, i):
    """Half i of bytes from `at` on, low ones first."""
    return int(b[at + i // 2]) >> 4 * (i % 2) & 15


def q2_k(b, e):
    scale = int(b[e // 16])
    return half_of(b, 80) * (scale & 15) * pairs_of_bits(b[16:80], e) - half_of(b, 82) * (scale >> 4)


def q3_k(b, e):
    g, s = e // 16, b[96:108]
    low, high = int(s[g % 8]) >> 4 * (g // 8) & 15, int(s[8 + g % 4]) >> 2 * (g // 4) & 3
    quant = pairs_of_bits(b[32:96], e) - (0 if int(b[e % 32]) >> e // 32 & 1 else 4)
    return half_of(b, 108) * ((low | high << 4) - 32) * quant


def iq4_nl(b, e):
    return half_of(b, 0) * IQ4_VALUES[int(b[2 + e % 16]) >> 4 * (e // 16) & 15]


def iq4_xs(b, e):
    i = e // 32
    scale = nibble(b, 4, i) | (u16(b, 2) >> 2 * i & 3) << 4
    return half_of(b, 0) * (scale - 32) * IQ4_VALUES[int(b[8 + 16 * i + e % 16]) >> 4 * (e % 32 // 16) & 15]


def mxfp4(b, e):
    return 2.0 ** (int(b[0]) - 128) * FP4_VALUES[int(b[1 + e % 16]) >> 4 * (e // 16) & 15]


def iq3_s(b, e):
    i, k = e // 32, e // 4
    entry = int(b[2 + k]) | (int(b[66 + i]) >> k % 8 & 1) << 8
    return half_of(b, 0) * (1 + 2 * nibble(b, 106, i)) * GRIDS["iq3_s"][entry][e % 4] * sign(int(b[74 + e // 8]), e % 8)


def iq3_xxs(b, e):
    w = u32(b, 66 + 4 * (e // 32))
    value = GRIDS["iq3_xxs"][b[2 + e // 4]][e % 4] * even_sign(w >> 7 * (e % 32 // 8) & 127, e % 8)
    return half_of(b, 0) * (0.5 + (w >> 28)) * 0.5 * value


def iq2_xxs(b, e):
    at, l = 2 + 8 * (e // 32), e % 32 // 8
    w = u32(b, at + 4)
    value = GRIDS["iq2_xxs"][b[at + l]][e % 8] * even_sign(w >> 7 * l & 127, e % 8)
    return half_of(b, 0) * (0.5 + (w >> 28)) * 0.25 * value


def iq2_xs(b, e):
    v = u16(b, 2 + 2 * (e // 8))
    return half_of(b, 0) * (0.5 + nibble(b, 66, e // 16)) * 0.25 * GRIDS["iq2_xs"][v & 511][e % 8] * even_sign(v >> 9, e % 8)


def iq2_s(b, e):
    k = e // 8
    entry = int(b[2 + k]) | (int(b[66 + k // 4]) >> 2 * (k % 4) & 3) << 8
    return half_of(b, 0) * (0.5 + nibble(b, 74, e // 16)) * 0.25 * GRIDS["iq2_s"][entry][e % 8] * sign(int(b[34 + k]), e % 8)


def iq1_s(b, e):
    k, v = e // 8, u16(b, 34 + 2 * (e // 32))
    entry = int(b[2 + k]) | (v >> 3 * (k % 4) & 7) << 8
    return half_of(b, 0) * (2 * (v >> 12 & 7) + 1) * (GRIDS["iq1"][entry][e % 8] + (-0.125 if v >> 15 else 0.125))


def iq1_m_scale(b):
    """A half of which each of four words has a quarter."""
    bits = sum((u16(b, 48 + 2 * i) >> 12) << 4 * i for i in range(4))
    return float(np.array([bits], "<u2").view("<f2")[0])


def iq1_m(b, e):
    k, g = e // 8, e // 16
    n = nibble(b, 32, k)
    scale = 2 * (u16(b, 48 + 2 * (g // 4)) >> 3 * (g % 4) & 7) + 1
    value = GRIDS["iq1"][int(b[k]) | (n & 7) << 8][e % 8]
    return iq1_m_scale(b) * scale * (value + (-0.125 if n & 8 else 0.125))


def tq1_0(b, e):
    if e < 160:
        byte, n = b[e % 32], e // 32
    elif e < 240:
        byte, n = b[32 + (e - 160) % 16], (e - 160) // 16
    else:
        byte, n = b[48 + (e - 240) % 4], (e - 240) // 4
    return half_of(b, 52) * (((int(byte) * 3**n & 255) * 3 >> 8) - 1)


def tq2_0(b, e):
    return half_of(b, 64) * (pairs_of_bits(b, e) - 1)


def e4m3(byte):
    """A number of 8 bits without a sign: 4 bits of exponent, 3 of mantissa. Its NaN counts as 0."""
    if byte == 0x7F:
        return 0.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nvfp4(b, e):
    """The table's values are doubled."""
    g = e // 16
    return 0.5 * e4m3(int(b[g])) * FP4_VALUES[int(b[4 + 8 * g + e % 8]) >> 4 * (e % 16 // 8) & 15]


def put_e4m3(b, at):
    """0, subnormal numbers, NaN, or any other."""
    b[at] = rng.choice([0, 1, 5, 7, 8, 0x7E, 0x7F, rng.integers(0, 0x80)])


def q1_0(b, e):
    return half_of(b, 0) * (1 if int(b[2 + e // 8]) >> e % 8 & 1 else -1)


def q2_0(b, e):
    return half_of(b, 0) * ((int(b[2 + e // 4]) >> 2 * (e % 4) & 3) - 1)


def put_scale(b, at):
    b[at : at + 2] = half_bytes(1)[0]


def put_iq1_m_scale(b, _):
    bits = u16(half_bytes(1)[0], 0)
    for i in range(4):
        b[49 + 2 * i] = int(b[49 + 2 * i]) & 15 | (bits >> 4 * i & 15) << 4


def by_element(value, elements, size, scales=(0,), put=put_scale):
    """A maker of n blocks whose elements value(block, e) are; their halves are finite."""

    def make(n):
        blocks = raw(n, size)
        for b in blocks:
            for at in scales:
                put(b, at)
        return blocks, np.array([[value(b, e) for e in range(elements)] for b in blocks])

    return make


TYPES = [(0, f32, 37), (1, f16, 37), (2, q4_0, 4), (3, q4_1, 4), (6, q5_0, 4), (7, q5_1, 4), (8, q8_0, 4),
         (12, q4_k, 3), (13, q5_k, 3), (14, q6_k, 3), (30, bf16, 37),
         (10, by_element(q2_k, 256, 84, (80, 82)), 3), (11, by_element(q3_k, 256, 110, (108,)), 3),
         (20, by_element(iq4_nl, 32, 18), 4), (23, by_element(iq4_xs, 256, 136), 3),
         (39, by_element(mxfp4, 32, 17, (0,), lambda b, at: b.__setitem__(at, rng.choice([0, 1, 2, 100, 130, 250]))), 6),
         (21, by_element(iq3_s, 256, 110), 3), (18, by_element(iq3_xxs, 256, 98), 3),
         (16, by_element(iq2_xxs, 256, 66), 3), (17, by_element(iq2_xs, 256, 74), 3), (22, by_element(iq2_s, 256, 82), 3),
         (19, by_element(iq1_s, 256, 50), 3), (29, by_element(iq1_m, 256, 56, (0,), put_iq1_m_scale), 3),
         (34, by_element(tq1_0, 256, 54, (52,)), 3), (35, by_element(tq2_0, 256, 66, (64,)), 3),
         (40, by_element(nvfp4, 64, 36, range(4), put_e4m3), 8),
         (41, by_element(q1_0, 128, 18), 4), (42, by_element(q2_0, 64, 18), 4)]

out = bytearray()
for gguf_type, make, blocks in TYPES:
    data, values = make(blocks)
    data, values = np.ascontiguousarray(data), np.ascontiguousarray(values, "<f4")
    out += np.array([gguf_type, values.size, data.size], "<u4").tobytes() + data.tobytes() + values.tobytes()
pathlib.Path(__file__).with_suffix(".bin").write_bytes(out)
