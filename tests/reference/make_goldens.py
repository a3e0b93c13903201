#!/usr/bin/env python3
"""Writes the goldens in this folder: tiny models with seeded weights, and their answers and the demo model's by llm.py.

    make_goldens.py            rewrites tiny-*.gguf, models.json, policies.json (numpy alone; half a minute)

Each golden carries its tolerance. A runtime in float32 that sums in another order differs by last bits, and where these
decide how a key or value is rounded, by a step of float16 there. The first is eight times the difference between llm.py in
float64 and in float32; the second at most a quarter of what float16 keys and values change at all, since few are decided
so. The larger of the two is taken; a mistake is further away.
"""
import json, os, struct
import numpy as np
import llm
from llm import F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "../../models")
VOCAB, SEED = 64, 20261121


# ---- tiny models ----

def packed(rng, kind, shape, std):
    """Bytes of a matrix (rows, cols) with values of about this deviation."""
    n = int(np.prod(shape))
    if kind not in (F32, F16, BF16):
        per, size = llm.BLOCK[kind]
        b = rng.integers(0, 256, (n // per, size), dtype=np.uint8)  # any bytes are valid but for the block's own factors
        where = {Q4_1: [0, 2], Q5_1: [0, 2], Q4_K: [0, 2], Q5_K: [0, 2], Q6_K: [208]}.get(kind, [0])
        # The second factor takes the mean away: half the largest quant times the first, with the sign that its type adds it.
        second = {Q4_1: -7.5, Q5_1: -15.5, Q4_K: 7.5, Q5_K: 15.5}
        factor = rng.uniform(0.5, 1.5, len(b))
        def set_factors(unit):
            for at, scale in zip(where, (1, second.get(kind))):
                b[:, at:at + 2] = (factor * unit * scale).astype(np.float16).view(np.uint8).reshape(-1, 2)
            return llm.dequantise(kind, b.ravel())
        set_factors(std / set_factors(1 / 64).std() / 64)
        return b.tobytes()
    x = (rng.standard_normal(n) * std).astype(np.float32)
    if kind == F32: return x.tobytes()
    if kind == F16: return x.astype(np.float16).tobytes()
    return (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def kv(key, value):
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    if isinstance(value, str): return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float): return text(key) + struct.pack("<If", 6, value)
    return text(key) + struct.pack("<II", 4, value)


def write_model(path, arch, tensors, L, d, H, Hkv, dh, ff, **more):
    """tensors: (name, type, shape with rows first, bytes)"""
    meta = {"general.architecture": arch, "general.alignment": 32, "vocab_size": VOCAB, "context_length": 256, "block_count": L,
            "embedding_length": d, "feed_forward_length": ff, "attention.head_count": H, "attention.head_count_kv": Hkv,
            "attention.key_length": dh, "attention.value_length": dh, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e4, "rope.dimension_count": dh, **more}
    head = b"".join(kv(k if k.startswith("general.") else f"{arch}.{k}", v) for k, v in meta.items())
    infos, at = b"", 0
    for name, kind, shape, data in tensors:
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += struct.pack("<IQ", kind, at)
        at += -(-len(data) // 32) * 32
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta)) + head + infos)
        for *_, data in tensors: f.write(b"\0" * (-f.tell() % 32) + data)
        f.write(b"\0" * (-f.tell() % 32))


def tiny(name, arch, L, d, H, Hkv, dh, ff, kinds, tied=False, biases=(), qk_norm=False, divide={}, experts=0, shared=0, **more):
    """kinds: types of the matrices, taken in turn; one whose blocks do not fit becomes Q8_0. divide: tensors of rope factors.
    experts: in each layer, two of which a token uses; shared: how wide one is that all tokens use."""
    rng, tensors, turn = np.random.default_rng(SEED), [], [0]
    vector = lambda n, size, around, std: tensors.append((n, F32, (size,), (around + std * rng.standard_normal(size)).astype(np.float32).tobytes()))
    def matrix(n, rows, cols, gain=1.0, count=()):
        kind = kinds[turn[0] % len(kinds)]
        turn[0] += 1
        if cols % llm.BLOCK[kind][0]: kind = Q8_0
        tensors.append((n, kind, (*count, rows, cols), packed(rng, kind, (*count, rows, cols), gain / np.sqrt(cols))))
    matrix("token_embd.weight", VOCAB, d, 1.5 if tied else 8.0)
    vector("output_norm.weight", d, 1, 0.1)
    if not tied: matrix("output.weight", VOCAB, d, 1.5)
    for n, factors in divide.items(): tensors.append((n, F32, factors.shape, factors.astype(np.float32).tobytes()))
    for i in range(L):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", d, 1, 0.1), vector(b + "ffn_norm.weight", d, 1, 0.1)
        if arch == "phi3": matrix(b + "attn_qkv.weight", (H + 2 * Hkv) * dh, d, 1.5)
        for part, heads in (("q", H), ("k", Hkv), ("v", Hkv)) if arch != "phi3" else ():
            matrix(b + f"attn_{part}.weight", heads * dh, d, 1.0 if part == "v" else 1.5)  # peaked enough for positions to matter
            if part in biases: vector(b + f"attn_{part}.bias", heads * dh, 0, 0.3)
        matrix(b + "attn_output.weight", d, H * dh)
        if "output" in biases: vector(b + "attn_output.bias", d, 0, 0.3)
        if qk_norm: vector(b + "attn_q_norm.weight", dh, 1.5, 0.3), vector(b + "attn_k_norm.weight", dh, 1.5, 0.3)
        if experts:
            tensors.append((b + "ffn_gate_inp.weight", F32, (experts, d), packed(rng, F32, (experts, d), 2 / np.sqrt(d))))
            for part in ("gate", "up", "down"): matrix(b + f"ffn_{part}_exps.weight", *((d, ff) if part == "down" else (ff, d)), count=(experts,))
            for part in ("gate", "up", "down") if shared else (): matrix(b + f"ffn_{part}_shexp.weight", *((d, shared) if part == "down" else (shared, d)))
            continue
        if arch == "phi3": matrix(b + "ffn_up.weight", 2 * ff, d)
        else: matrix(b + "ffn_gate.weight", ff, d), matrix(b + "ffn_up.weight", ff, d)
        matrix(b + "ffn_down.weight", d, ff)
    if experts: more = {"expert_count": experts, "expert_used_count": 2, **more}
    if shared: more = {"expert_shared_feed_forward_length": shared, **more}
    write_model(os.path.join(HERE, name), arch, tensors, L, d, H, Hkv, dh, ff, **more)


def tolerance(exact, rough, unrounded):
    """Of logits: float64, float32, and float64 over keys and values that are not rounded to float16."""
    return float(max(8 * np.abs(exact - rough).max(), np.abs(exact - unrounded).max() / 4))


def variants(*files, context=0):
    return [llm.Model(*files, context=context, **how) for how in ({}, {"dtype": np.float32}, {"kv_f16": False})]


def greedy(all_models, prompt, count):
    """The logits after the prompt and after all but the last of its greedy tokens, these tokens, and the tolerance."""
    rows, tokens, allowed, now = [], [], 0, [m.run(prompt)[-1] for m in all_models]
    for _ in range(count):
        allowed, rows = max(allowed, tolerance(*now)), rows + [now[0]]
        tokens.append(int(now[0].argmax()))
        now = [m.run(tokens[-1:])[-1] for m in all_models]
    return rows, tokens, allowed


def best(logits, digits):
    """The 64 largest: [token, logit]."""
    return [[int(i), round(float(logits[i]), digits)] for i in np.argsort(-logits)[:64]]


def write_tiny_models():
    """[file, length of the prompt, context or 0 for the file's own]"""
    tiny("tiny-quants.gguf", "llama", 2, 64, 4, 2, 16, 96, [Q4_1, Q5_0, Q5_1, Q4_0, Q8_0])
    tiny("tiny-k-quants.gguf", "llama", 1, 256, 8, 2, 32, 256, [Q5_K, Q4_K, Q6_K, Q5_K])
    tiny("tiny-qwen3.gguf", "qwen3", 2, 64, 4, 2, 24, 96, [BF16], tied=True, qk_norm=True)
    tiny("tiny-biases.gguf", "llama", 2, 64, 4, 2, 16, 96, [F16, F32], biases=("q", "k", "v", "output"), tied=True, **{"rope.dimension_count": 8})
    # In three layers each matrix has each of three types.
    small = dict(L=3, d=32, H=2, Hkv=1, dh=16, ff=64, kinds=[F16, Q8_0, Q4_0])
    qkv = ("q", "k", "v")
    tiny("tiny-llama.gguf", "llama", **small)
    tiny("tiny-qwen2.gguf", "qwen2", biases=qkv, **small)
    tiny("tiny-qwen2-k-quants.gguf", "qwen2", 1, 256, 2, 1, 16, 64, [Q4_K, Q6_K], biases=qkv)
    tiny("tiny-phi3.gguf", "phi3", **small)
    # Texts of 150 tokens on models that were trained on 64.
    scaled = lambda kind, **more: {"rope.scaling.type": kind, "rope.scaling.original_context_length": 64, **more}
    slow = np.linspace(0, 1, 8) ** 2  # of the 8 pairs of channels, the last turn slowest
    tiny("tiny-linear.gguf", "llama", **small, **scaled("linear", **{"rope.scaling.factor": 4.0}))
    tiny("tiny-yarn.gguf", "llama", **small, **scaled("yarn", **{"rope.scaling.factor": 4.0}))
    tiny("tiny-qwen2-yarn.gguf", "qwen2", biases=qkv, **small, **scaled("yarn", **{"rope.scaling.factor": 4.0}))
    tiny("tiny-llama3.gguf", "llama", divide={"rope_freqs.weight": 1 + 7 * slow}, **small)
    tiny("tiny-longrope.gguf", "phi3", divide={"rope_factors_long.weight": 1 + 15 * slow, "rope_factors_short.weight": 1 + slow / 2},
         **small, **scaled("longrope", **{"rope.scaling.attn_factor": 1.19}))
    # As Phi-4-mini: the last channels of a head are left as they are, each factor is one of n_rot / 2; a window that no layer has.
    part = slow[:6]
    tiny("tiny-phi4-mini.gguf", "phi3", divide={"rope_factors_long.weight": 1 + 15 * part, "rope_factors_short.weight": 1 + part}, tied=True,
         **small, **scaled("longrope", **{"rope.scaling.attn_factor": 1.19, "rope.dimension_count": 12, "attention.sliding_window": 16}))
    # The ramp begins elsewhere than in other families, and the magnitude differs.
    ramp = {"rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.5, "rope.scaling.yarn_log_multiplier": 0.5}
    tiny("tiny-mistral3.gguf", "mistral3", 3, 32, 2, 1, 32, 64, [F16, Q8_0, Q4_0], **scaled("yarn", **ramp))
    # As Ministral 3: queries grow, at positions 64 and 128 of these texts.
    tiny("tiny-ministral3.gguf", "mistral3", 3, 32, 2, 1, 32, 64, [F16, Q8_0, Q4_0], **scaled("yarn", **ramp, **{"attention.temperature_scale": 0.5}))
    scales = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 1.5}
    tiny("tiny-granitemoe.gguf", "granitemoe", experts=4, **small, **scales)
    # The expert that all tokens share is wider than two others.
    tiny("tiny-granitemoe-shared.gguf", "granitemoe", experts=4, shared=160, **small, **scales)
    plain = ["tiny-quants", "tiny-k-quants", "tiny-qwen3", "tiny-biases", "tiny-llama", "tiny-qwen2", "tiny-qwen2-k-quants", "tiny-phi3", "tiny-granitemoe", "tiny-granitemoe-shared"]
    far = ["tiny-linear", "tiny-yarn", "tiny-qwen2-yarn", "tiny-llama3", "tiny-longrope", "tiny-mistral3", "tiny-ministral3", "tiny-phi4-mini"]
    near = ["tiny-longrope", "tiny-phi4-mini"]
    return [(n + ".gguf", 40, 0) for n in plain] + [(n + ".gguf", 150, 0) for n in far] + [(n + ".gguf", 40, 64) for n in near]


def models():
    cases = []
    def add(name, prompt, count, context, digits):
        path = os.path.join(HERE, name)
        rows, tokens, allowed = greedy(variants(path, context=context), prompt, count)
        gap = min(np.sort(x)[-1] - np.sort(x)[-2] for x in rows)
        print(f"{name}: {os.path.getsize(path)} bytes, tolerance {allowed:.1e}, gap {gap:.1e}, {tokens}")
        assert gap > 2 * allowed, "two tokens are nearly as likely: another seed"
        unscaled = llm.Model(path, context=context)
        if (unscaled.freq != (usual := 1e4 ** (-np.arange(0, unscaled.n_rot, 2) / unscaled.n_rot))).any() and name.startswith("tiny"):
            unscaled.freq, unscaled.factor = usual, 1.0
            assert np.abs(unscaled.run(prompt)[-1] - rows[0]).max() > 20 * allowed, "scaled positions hardly matter: sharper attention"
        without = llm.Model(path, context=context)
        if without.growth or without.layers[0]["ffn_gate_shexp"] is not None:
            without.growth = 0
            for layer in without.layers: layer["ffn_gate_shexp"] = None
            assert np.abs(without.run(prompt)[-1] - rows[0]).max() > 20 * allowed, "larger queries or the shared expert hardly matter"
        cases.append({"model": name, "prompt": prompt, "context": context, "tolerance": allowed, "greedy": tokens,
                      "top": best(rows[0], digits), "last_top": best(rows[-1], digits)})
    for name, length, context in write_tiny_models():
        add(name, np.random.default_rng(SEED).integers(0, VOCAB, length).tolist(), 8, context, 7)
    demo = os.path.relpath(os.path.join(MODELS, "thimble-demo-28m-q8_0.gguf"), HERE)
    ids = book_ids(llm.Model(os.path.join(HERE, demo)), 4000)
    for at in (1, 1500, 3500): add(demo, ids[:1] + ids[at:at + 61], 8, 0, 5)
    json.dump(cases, open(os.path.join(HERE, "models.json"), "w"), separators=(",", ":"))


# ---- policies, on the demo model ----

def book_ids(m, count):
    """Some ids of the book's text: the longest token that fits, each time (not as a tokeniser would, and needs not be)."""
    printable = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or 174 <= b]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    text = "".join(stand_in[b] for b in open(os.path.join(MODELS, "demo-book.txt"), "rb").read(6 * count))
    index = {t: i for i, t in enumerate(m.gguf.meta["tokenizer.ggml.tokens"])}
    ids, at = [m.gguf.meta["tokenizer.ggml.bos_token_id"]], 0
    while len(ids) < count:
        size = next(n for n in range(24, 0, -1) if text[at:at + n] in index)
        ids.append(index[text[at:at + size]])
        at += size
    return ids


def policies():
    """Float32 may decide otherwise for the positions that are listed as `close`: their score or vote is within four times the
    largest error of float32 from the threshold (architecture, "Numbers and exactness")."""
    path, heads = (os.path.join(MODELS, "thimble-demo-28m" + end) for end in ("-q8_0.gguf", ".locret.gguf"))
    exact, rough, _ = variants(path, heads)  # unrounded, it would keep others; eight times is enough for so many values
    ids = book_ids(exact, 720)
    out = {"ids": ids, "locret": [], "select": []}
    L, S = dict(b=128, chunk=96, ns=32, local=20), dict(k=32, n_init=4, n_local=16)

    def logits(x, y):
        return {"tolerance": float(8 * np.abs(x - y).max()), "top": best(x, 5)}

    for shared in (False, True):
        for m in (exact, rough):
            m.clear()
            m.logits = m.read_locret(ids[:700], **L, shared=shared)
        assert all((a.pos == b.pos).all() for a, b in zip(exact.pool, rough.pool)), "a choice is too close: another n"
        error = [np.abs(a.cis - b.cis).max() for a, b in zip(exact.pool, rough.pool)]
        close = [[set() for _ in range(exact.Hkv)] for _ in range(exact.L)]
        for l, j, pos, margin in exact.margins: close[l][j] |= set(pos[margin <= 4 * error[l]].tolist())
        out["locret"].append({"n": 700, **L, "shared": shared, **logits(exact.logits, rough.logits),
                              "kept": [p.pos.tolist() for p in exact.pool], "close": [[sorted(c) for c in row] for row in close]})
        print(f"locret, shared {shared}: tolerance {out['locret'][-1]['tolerance']:.1e}, score errors {['%.0e' % e for e in error]},",
              f"close {sum(len(c) for row in close for c in row)} of {exact.L * exact.Hkv * 700}")

    for locret, n, vote in [(f, n, v) for f, n in ((False, 300), (True, 701)) for v in ("layer", "group")]:
        for m in (exact, rough):  # one decoded token after n others
            m.clear()
            m.read_locret(ids[:n], **L) if locret else m.run(ids[:n])
            m.select = m.token_select(**S, vote=vote)
            m.logits = m.run(ids[n:n + 1], m.select)[-1]
        assert all((a == b).all() for x, y in zip(exact.select.lists, rough.select.lists) for a, b in zip(x, y)), "a pick is too close"
        close, sets = [], exact.Hkv if vote == "group" else 1
        for votes, other, positions, margin in zip(exact.select.votes, rough.select.votes, exact.select.positions, exact.select.margins):
            error = np.abs(votes - other)[margin < 1].max()  # far from the threshold an error does no harm
            close.append(positions[margin <= 4 * error].tolist())
        at = lambda l, j, row: exact.pool[l].pos[j, row].tolist()
        out["select"].append({"n": n, "locret": locret, "vote": vote, **S, **logits(exact.logits, rough.logits),
                              "lists": [[at(l, j, row) for j, row in enumerate(layer)] for l, layer in enumerate(exact.select.lists)],
                              "close": [[close[l * sets + min(j, sets - 1)] for j in range(exact.Hkv)] for l in range(exact.L)]})
        print(f"select, locret {locret}, {vote}: tolerance {out['select'][-1]['tolerance']:.1e}, close {[len(c) for c in close]}")
    json.dump(out, open(os.path.join(HERE, "policies.json"), "w"), separators=(",", ":"))


if __name__ == "__main__":
    models()
    policies()
