"""The second opinion: reads GGUF, runs a model, Locret and TokenSelect, plainly and in numpy alone.

Written from algorithms and file formats, sharing no code with the runtime, so that a mistake in one is not in the other.
Everything is computed in `dtype` (float64 unless asked otherwise); keys and values are rounded to float16 where the pool
holds them so. Arrays are [row][...] for tokens and [kv head][entry][...] for the pool.
"""
import math, struct
import numpy as np

# ---- files ----

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30
BLOCK = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34),
         Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210)}  # elements and bytes of a block


def f16(raw):
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)


def k_scales(raw):
    """[blocks][12] packed bytes -> the eight 6-bit scales and mins of Q4_K and Q5_K."""
    q = raw.astype(np.int64)
    low, mid, high = q[:, 0:4], q[:, 4:8], q[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    least = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], 1)
    return scale, least


def dequantise(kind, raw):
    """Bytes of whole blocks -> float64 values."""
    if kind == F32: return raw.view(np.float32).astype(np.float64)
    if kind == F16: return f16(raw)
    if kind == BF16: return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    b = raw.reshape(-1, BLOCK[kind][1])
    n = len(b)
    if kind == Q8_0: return (f16(b[:, :2]) * b[:, 2:].view(np.int8)).ravel()
    if kind in (Q4_0, Q4_1, Q5_0, Q5_1):  # 16 bytes hold elements 0..15 in their low and 16..31 in their high halves
        q = np.concatenate([b[:, -16:] & 15, b[:, -16:] >> 4], 1).astype(np.int64)
        if kind in (Q5_0, Q5_1):
            fifth = np.ascontiguousarray(b[:, -20:-16]).view(np.uint32).astype(np.int64)
            q |= (fifth >> np.arange(32) & 1) << 4
        if kind in (Q4_1, Q5_1): return (f16(b[:, :2]) * q + f16(b[:, 2:4])).ravel()
        return (f16(b[:, :2]) * (q - (8 if kind == Q4_0 else 16))).ravel()
    if kind in (Q4_K, Q5_K):  # 64 elements take 32 bytes: first the low halves, then the high ones
        scale, least = k_scales(b[:, 4:16])
        nibbles = b[:, -128:].reshape(n, 4, 1, 32)
        q = np.concatenate([nibbles & 15, nibbles >> 4], 2).reshape(n, 8, 32).astype(np.int64)
        if kind == Q5_K: q |= (b[:, 16:48].astype(np.int64)[:, None, :] >> np.arange(8)[:, None] & 1) << 4
        d, dmin = f16(b[:, 0:2])[:, :, None], f16(b[:, 2:4])[:, :, None]
        return (d * scale[:, :, None] * q - dmin * least[:, :, None]).ravel()
    if kind == Q6_K:  # two halves of 128 elements; four runs of 32 share 64 bytes of low and 32 bytes of high bits
        low, high = b[:, :128].reshape(n, 2, 2, 32), b[:, 128:192].reshape(n, 2, 1, 32)
        q = np.concatenate([low & 15, low >> 4], 2).astype(np.int64) | (high >> np.array([0, 2, 4, 6])[:, None] & 3).astype(np.int64) << 4
        scale = np.repeat(b[:, 192:208].view(np.int8).astype(np.float64), 16, 1)
        return (f16(b[:, 208:210]) * scale * (q.reshape(n, 256) - 32)).ravel()
    raise ValueError(f"type {kind}")


class Gguf:
    def __init__(self, path):
        self.data, self.at = np.fromfile(path, np.uint8), 0
        magic, version, tensors, keys = struct.unpack("<4sIQQ", self.take(24))
        assert magic == b"GGUF" and version == 3, path
        self.meta = {}
        for _ in range(keys):
            key = self.string()
            self.meta[key] = self.value(self.u32())
        self.infos = {}
        for _ in range(tensors):
            name = self.string()
            shape = struct.unpack(f"<{(d := self.u32())}Q", self.take(8 * d))
            self.infos[name] = (shape, self.u32(), struct.unpack("<Q", self.take(8))[0])
        align = self.meta.get("general.alignment", 32)
        self.start = -(-self.at // align) * align

    def take(self, n):
        self.at += n
        return self.data[self.at - n:self.at].tobytes()

    def u32(self): return struct.unpack("<I", self.take(4))[0]
    def string(self): return self.take(struct.unpack("<Q", self.take(8))[0]).decode("utf-8", "surrogateescape")

    def value(self, kind):
        if kind == 8: return self.string()
        if kind == 9:
            inner, count = struct.unpack("<IQ", self.take(12))
            return [self.value(inner) for _ in range(count)]
        return struct.unpack("<" + SCALARS[kind], self.take(struct.calcsize("<" + SCALARS[kind])))[0]

    def tensor(self, name, dtype=np.float64):
        """[rows][cols] or [cols]; None where the file has none."""
        if name not in self.infos: return None
        shape, kind, offset = self.infos[name]
        size = math.prod(shape) // BLOCK[kind][0] * BLOCK[kind][1]
        raw = self.data[self.start + offset:self.start + offset + size].copy()
        return dequantise(kind, raw).reshape(shape[::-1]).astype(dtype)


# ---- rotary positions ----

def rope(g, arch, n_rot, context):
    """Inverse frequencies [n_rot / 2] and the factor on cos and sin."""
    get = lambda key, default: g.meta.get(f"{arch}.rope.{key}", default)
    base, original = get("freq_base", 10000.0), get("scaling.original_context_length", g.meta[arch + ".context_length"])
    freq, factor = base ** (-np.arange(0, n_rot, 2) / n_rot), get("scaling.attn_factor", 1.0)
    kind, scale = get("scaling.type", "none"), get("scaling.factor", 1.0)
    if kind == "linear": freq = freq / scale
    if kind == "yarn":  # fast channels turn as trained, slow ones are interpolated, with a ramp between them
        own = (lambda key, default: get("scaling.yarn_" + key, default)) if arch == "mistral3" else lambda key, default: default
        channel = lambda turns: n_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        low, high = max(0, math.floor(channel(own("beta_fast", 32)))), min(n_rot - 1, math.ceil(channel(own("beta_slow", 1))))
        keep = 1 - np.clip((np.arange(n_rot // 2) - low) / max(0.001, high - low), 0, 1)
        freq, factor = freq * keep + freq / scale * (1 - keep), factor * (1 + 0.1 * math.log(scale)) / (1 + 0.1 * own("log_multiplier", 0) * math.log(scale))
    divide = g.tensor("rope_freqs.weight")
    if "rope_factors_long.weight" in g.infos:
        divide = g.tensor("rope_factors_long.weight" if context > original else "rope_factors_short.weight")
    return (freq if divide is None else freq / divide), factor


# ---- the model ----

def silu(a): return a / (1 + np.exp(-a))


class Pool:
    """One layer: what every KV head holds, in the order of the text."""
    def __init__(self, m):
        self.k = self.v = np.zeros((m.Hkv, 0, m.dh), m.dtype)
        self.pos = np.zeros((m.Hkv, 0), np.int64)
        self.cis = np.zeros((m.Hkv, 0), m.dtype)

    def __len__(self): return self.pos.shape[1]

    def keep(self, index):
        """index [kv head][entries]"""
        self.k = np.take_along_axis(self.k, index[:, :, None], 1)
        self.v = np.take_along_axis(self.v, index[:, :, None], 1)
        self.pos, self.cis = np.take_along_axis(self.pos, index, 1), np.take_along_axis(self.cis, index, 1)


class Model:
    def __init__(self, path, heads=None, dtype=np.float64, context=0, kv_f16=True):
        g = self.gguf = Gguf(path)
        arch = self.arch = g.meta["general.architecture"]
        get = lambda key, default=None: g.meta.get(f"{arch}.{key}", default)
        self.dtype, self.kv_f16 = dtype, kv_f16
        self.L, self.d, self.H = get("block_count"), get("embedding_length"), get("attention.head_count")
        self.Hkv = get("attention.head_count_kv", self.H)
        self.dh = get("attention.key_length", self.d // self.H)
        self.eps = get("attention.layer_norm_rms_epsilon")
        self.n_rot = get("rope.dimension_count", self.dh)
        self.freq, self.factor = rope(g, arch, self.n_rot, context or get("context_length"))
        self.adjacent = arch in ("llama", "mistral3", "granite", "granitemoe")
        scales = get if arch.startswith("granite") else lambda key: None  # 0 is as good as none
        self.embedding_scale, self.residual_scale, self.logit_scale = (scales(n + "_scale") or 1 for n in ("embedding", "residual", "logit"))
        self.attention_divisor = 1 / scales("attention.scale") if scales("attention.scale") else math.sqrt(self.dh)
        self.chosen = get("expert_used_count", 0)
        self.growth = get("attention.temperature_scale", 0) if arch == "mistral3" else 0
        self.period = get("rope.scaling.original_context_length", get("context_length"))
        w = lambda name: g.tensor(name, dtype)
        self.embedding, self.output_norm = w("token_embd.weight"), w("output_norm.weight")
        out = w("output.weight")
        self.output = self.embedding if out is None else out
        self.layers = []
        for i in range(self.L):
            t = lambda name: w(f"blk.{i}.{name}")
            b = {n: t(n + ".weight") for n in ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm",
                                              "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
                                              "ffn_down_exps", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")}
            b.update({n + "_bias": t(n + ".bias") for n in ("attn_q", "attn_k", "attn_v", "attn_output")})
            if (qkv := t("attn_qkv.weight")) is not None:  # phi3 fuses them
                b["attn_q"], b["attn_k"], b["attn_v"] = np.split(qkv, [self.H * self.dh, (self.H + self.Hkv) * self.dh])
                b["ffn_gate"], b["ffn_up"] = np.split(b["ffn_up"], 2)
            self.layers.append(b)
        self.fc = None
        if heads:
            s = Gguf(heads)
            self.fc = [(s.tensor(f"blk.{i}.locret_fc1.weight", dtype), s.tensor(f"blk.{i}.locret_fc2.weight", dtype)) for i in range(self.L)]
        self.clear()

    def clear(self):
        self.pool, self.position, self.margins = [Pool(self) for _ in range(self.L)], 0, []

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.eps)) * weight

    def rotate(self, x, positions):
        """x [...][n][dh], positions [n]; the angle is computed in float64."""
        angle = np.asarray(positions, np.float64)[:, None] * self.freq
        c, s = (np.cos(angle) * self.factor).astype(self.dtype), (np.sin(angle) * self.factor).astype(self.dtype)
        y, half = x.copy(), self.n_rot // 2
        i, j = (slice(0, self.n_rot, 2), slice(1, self.n_rot, 2)) if self.adjacent else (slice(0, half), slice(half, self.n_rot))
        y[..., i], y[..., j] = x[..., i] * c - x[..., j] * s, x[..., i] * s + x[..., j] * c
        return y

    def feed_forward(self, x, b):
        swiglu = lambda x, gate, up, down: (silu(x @ gate.T) * (x @ up.T)) @ down.T
        if b["ffn_gate_inp"] is None: return swiglu(x, b["ffn_gate"], b["ffn_up"], b["ffn_down"])
        likes, y = x @ b["ffn_gate_inp"].T, np.zeros_like(x)
        for row, like in enumerate(likes):  # the softmax over the chosen ones equals the softmax over all, divided by its sum over the chosen
            best = np.argsort(-like, kind="stable")[:self.chosen]
            share = np.exp(like[best] - like[best[0]])
            for e, w in zip(best, share / share.sum()):
                y[row] += w * swiglu(x[row], *(b[f"ffn_{n}_exps"][e] for n in ("gate", "up", "down")))
        if b["ffn_gate_shexp"] is not None: y += swiglu(x, *(b[f"ffn_{n}_shexp"] for n in ("gate", "up", "down")))
        return y

    def run(self, ids, select=None):
        """Reads tokens as one chunk and appends them to the pool; the logits of every row. `select(layer, q)`, for one
        row, gives each KV head's ascending list of entries; without it all are attended."""
        c, g, dtype = len(ids), self.H // self.Hkv, self.dtype
        stored = (lambda a: a.astype(np.float16).astype(dtype)) if self.kv_f16 else (lambda a: a)
        linear = lambda a, b, name: a @ b[name].T + (0 if b.get(name + "_bias") is None else b[name + "_bias"])
        h = self.embedding[ids] * dtype(self.embedding_scale)
        for l, (b, p) in enumerate(zip(self.layers, self.pool)):
            x = self.norm(h, b["attn_norm"])
            q, k, v = (linear(x, b, "attn_" + n).reshape(c, -1, self.dh).transpose(1, 0, 2) for n in "qkv")
            if b["attn_q_norm"] is not None: q, k = self.norm(q, b["attn_q_norm"]), self.norm(k, b["attn_k_norm"])
            if self.fc:  # before rotation and before rounding
                flat = np.concatenate([a.transpose(1, 0, 2).reshape(c, -1) for a in (q, k, v)], 1)
                cis = (silu(flat @ self.fc[l][0].T) @ self.fc[l][1].T).T
            else: cis = np.zeros((self.Hkv, c), dtype)
            q = q * (1 + self.growth * np.log(1 + (self.position + np.arange(c)) // self.period))[:, None].astype(dtype)
            p.k, p.v = np.concatenate([p.k, stored(k)], 1), np.concatenate([p.v, stored(v)], 1)
            p.pos = np.concatenate([p.pos, np.tile(self.position + np.arange(c), (self.Hkv, 1))], 1)
            p.cis = np.concatenate([p.cis, cis], 1)
            lists = select(l, q) if select else [np.arange(len(p))] * self.Hkv
            out = np.empty((self.H, c, self.dh), dtype)
            for j, list_ in enumerate(lists):
                n = len(list_)
                own = self.rotate(q[j * g:(j + 1) * g], n - c + np.arange(c))
                s = own @ self.rotate(p.k[j, list_], np.arange(n)).T / dtype(self.attention_divisor)
                s[:, np.arange(n)[None, :] > n - c + np.arange(c)[:, None]] = -np.inf
                s = np.exp(s - s.max(-1, keepdims=True))
                out[j * g:(j + 1) * g] = s / s.sum(-1, keepdims=True) @ p.v[j, list_]
            h = h + linear(out.transpose(1, 0, 2).reshape(c, -1), b, "attn_output") * dtype(self.residual_scale)
            h = h + self.feed_forward(self.norm(h, b["ffn_norm"]), b) * dtype(self.residual_scale)
        self.position += c
        return self.norm(h, self.output_norm) @ self.output.T / dtype(self.logit_scale)

    # ---- Locret (algorithms 2.5) ----

    def evict(self, b, ns, last, shared=False):
        """Every head keeps its b best; without `last` the last ns entries stay. self.margins collects (layer, head,
        positions, distance of their scores from the threshold)."""
        for l, p in enumerate(self.pool):
            if len(p) <= b: continue
            key = p.cis.copy()
            if shared: key[:] = key.max(0)
            if not last and ns: key[:, -ns:] = np.inf
            rows = []
            for j, (score, pos) in enumerate(zip(key, p.pos)):
                order = np.lexsort((-pos, -score))  # best first; ties go to the larger position
                rows.append(np.sort(order[:b]))
                self.margins.append((l, j, pos, np.abs(score - (score[order[b - 1]] + score[order[b]]) / 2)))
            p.keep(np.array(rows))

    def read_locret(self, ids, b, chunk, ns, local, shared=False):
        """The whole loop; the logits after the last token."""
        end = len(ids) - local
        for lo in range(0, end, chunk):
            hi = min(lo + chunk, end)
            self.run(ids[lo:hi])
            self.evict(b, ns, last=hi == end, shared=shared)
        return self.run(ids[max(end, 0):])[-1]

    # ---- TokenSelect, one decoded token (algorithms 3 and 6.1) ----

    def token_select(self, k, n_init, n_local, vote):
        """A `select` for run(). `vote` is "layer" or "group". It records its lists, its log-votes, and the distance of each
        vote from the threshold, one array for each top-k."""
        g = self.H // self.Hkv

        def top(votes, positions):
            order = np.lexsort((-positions, -votes))  # best first; ties go to the larger position
            select.votes.append(votes)
            select.positions.append(positions)
            select.margins.append(np.abs(votes - (votes[order[k - 1]] + votes[order[k]]) / 2))
            return order[:k]

        def select(l, q):
            p = self.pool[l]
            n = len(p)
            if n <= n_init + k + n_local:
                lists = [np.arange(n)] * self.Hkv
            else:
                at, mid = self.rotate(q, [n_local])[:, 0], np.arange(n_init, n - n_local)
                s = np.stack([p.k[h // g, mid] @ at[h] for h in range(self.H)])
                s = s - s.max(-1, keepdims=True)
                log_p = s - np.log(np.exp(s).sum(-1, keepdims=True))
                votes = np.logaddexp.reduce(log_p.reshape(self.Hkv, g, -1), 1)
                if vote == "group":
                    picked = [top(votes[j], p.pos[j, mid]) for j in range(self.Hkv)]
                else:
                    sums = np.full(self.position + 1, -np.inf)
                    for j in range(self.Hkv): sums[p.pos[j, mid]] = np.logaddexp(sums[p.pos[j, mid]], votes[j])
                    held = np.flatnonzero(sums > -np.inf)
                    chosen = held[top(sums[held], held)]
                    picked = [np.flatnonzero(np.isin(p.pos[j, mid], chosen)) for j in range(self.Hkv)]
                lists = [np.concatenate([np.arange(n_init), n_init + np.sort(i), np.arange(n - n_local, n)]) for i in picked]
            select.lists.append(lists)
            return lists

        select.lists, select.votes, select.positions, select.margins = [], [], [], []
        return select
