#!/usr/bin/env python3
"""Writes draft_blocks.json: what the layers for multi-token prediction of synthetic files draft, by numpy alone.

    draft_block.py SYNTH_GGUF.PY            writes the golden (a minute); the argument is the tool that writes the files

Written from the formulas of the families, sharing no code with the runtime. The model reads a text token by token. Its
draft block reads, for each token but the first, the token's embedding and the model's last row (after output_norm) for the
token before it; then it goes on with its own tokens and its own last rows (after shared_head_norm). Keys and values are
rounded to float16, as in the pool. Written are, for each position, the guesses and their leads: how far the logit of a
guess exceeds the second best, as a share of the largest absolute logit.

A runtime sums in float32 in another order. make_goldens.py says how far this may move a logit: eight times what float32
moves the logits here, or a quarter of what the rounding of keys and values moves them. Only guesses are written whose logit
exceeds the second best by twice that.
"""
import json, os, subprocess, sys, tempfile
import numpy as np
import llm

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = [f"{shape} --seed 4 --sharp 3" for shape in (
    "tiny-qwen35-mtp f16 FILE", "tiny-qwen35moe f16 FILE --layers 6 --set nextn_predict_layers=1",
    "tiny-qwen3next f16 FILE --layers 8 --set nextn_predict_layers=1", "tiny-glm4moe f16 FILE", "tiny-deepseek2 f16 FILE")]
TOKENS, DRAFTED = 48, 3


def sigmoid(a): return 1 / (1 + np.exp(-a))


class Model:
    def __init__(self, path, dtype=np.float64, kv_f16=True):
        g = llm.Gguf(path)
        self.arch, self.dtype = g.meta["general.architecture"], dtype
        self.get = lambda key, default=None: g.meta.get(f"{self.arch}.{key}", default)
        self.stored = (lambda a: a.astype(np.float16).astype(dtype)) if kv_f16 else (lambda a: a)
        self.w = {name: g.tensor(name, dtype) for name in g.infos}
        self.H, self.Hkv = self.get("attention.head_count"), self.get("attention.head_count_kv")
        self.L, self.n_rot = self.get("block_count") - 1, self.get("rope.dimension_count")
        self.freq = self.get("rope.freq_base") ** (-np.arange(0, self.n_rot, 2) / self.n_rot)
        self.gated = self.arch in ("qwen35", "qwen35moe", "qwen3next")
        self.output = self.w.get("output.weight", self.w["token_embd.weight"])

    def norm(self, x, weight=1):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.get("attention.layer_norm_rms_epsilon"))) * weight

    def rotate(self, x, position):
        """x [...][n_rot]; deepseek2 pairs neighbours, the others halves."""
        c, s = (f(position * self.freq).astype(self.dtype) for f in (np.cos, np.sin))
        i, j = (slice(0, None, 2), slice(1, None, 2)) if self.arch == "deepseek2" else (slice(0, self.n_rot // 2), slice(self.n_rot // 2, None))
        y = x.copy()
        y[..., i], y[..., j] = x[..., i] * c - x[..., j] * s, x[..., i] * s + x[..., j] * c
        return y

    # ---- mixers: of one token, whose cache is a list of what came before ----

    def attend(self, q, keys, values, scale):
        """q [heads][dk] against keys [n][dk], values [n][dv]"""
        s = q @ np.array(keys).T * self.dtype(scale)
        s = np.exp(s - s.max(-1, keepdims=True))
        return s / s.sum(-1, keepdims=True) @ np.array(values)

    def attention(self, t, x, cache):
        dk, position = self.get("attention.key_length"), len(cache)
        linear = lambda n: t("attn_" + n + ".weight") @ x + (0 if t("attn_" + n + ".bias") is None else t("attn_" + n + ".bias"))
        q, k, v = linear("q"), linear("k").reshape(-1, dk), linear("v").reshape(-1, dk)
        gate = None
        if self.gated: q, gate = np.split(q.reshape(self.H, 2 * dk), 2, 1)
        q = q.reshape(self.H, dk)
        if t("attn_q_norm.weight") is not None: q, k = self.norm(q, t("attn_q_norm.weight")), self.norm(k, t("attn_k_norm.weight"))
        cache.append((self.stored(k), self.stored(v)))
        turned = lambda a, at: np.concatenate([self.rotate(a[..., :self.n_rot], at), a[..., self.n_rot:]], -1)
        q, g = turned(q, position), self.H // self.Hkv
        y = np.concatenate([self.attend(q[j * g:(j + 1) * g], [turned(k[j], at) for at, (k, _) in enumerate(cache)],
                                        [v[j] for _, v in cache], dk ** -0.5) for j in range(self.Hkv)])
        return t("attn_output.weight") @ (y if gate is None else y * sigmoid(gate)).ravel()

    def latent(self, t, x, cache):
        """Expanded: every head has keys and values of its own."""
        r, dk, position = self.get("attention.kv_lora_rank"), self.get("attention.key_length_mla"), len(cache)
        q = (t("attn_q_b.weight") @ self.norm(t("attn_q_a.weight") @ x, t("attn_q_a_norm.weight"))).reshape(self.H, dk)
        kv = t("attn_kv_a_mqa.weight") @ x
        cache.append((self.stored(self.norm(kv[:r], t("attn_kv_a_norm.weight"))), self.stored(kv[r:])))
        nope = dk - self.n_rot
        q[:, nope:] = self.rotate(q[:, nope:], position)
        k_b, v_b = t("attn_k_b.weight"), t("attn_v_b.weight")  # [H][r][nope], [H][dv][r]
        y = [self.attend(q[h:h + 1], [np.concatenate([c @ k_b[h], self.rotate(k, at)]) for at, (c, k) in enumerate(cache)],
                         [v_b[h] @ c for c, _ in cache], dk ** -0.5)[0] for h in range(self.H)]
        return t("attn_output.weight") @ np.concatenate(y)

    def delta_net(self, t, x, cache):
        """cache: the inputs of the convolution, and the state as its last element."""
        S, Nk, Nv, taps = (self.get("ssm." + k) for k in ("state_size", "group_count", "time_step_rank", "conv_kernel"))
        if not cache: cache.extend([[np.zeros(t("ssm_conv1d.weight").shape[0], self.dtype)] * taps, np.zeros((Nv, S, S), self.dtype)])
        cache[0] = cache[0][1:] + [t("attn_qkv.weight") @ x]
        y = llm.silu(sum(t("ssm_conv1d.weight")[:, j] * u for j, u in enumerate(cache[0])))
        q, k, v = (a.reshape(-1, S) for a in np.split(y, [Nk * S, 2 * Nk * S]))
        unit = lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + self.dtype(self.get("attention.layer_norm_rms_epsilon")))
        q, k = unit(q) * self.dtype(S ** -0.5), unit(k)
        if self.arch == "qwen3next":  # for each key head: the betas of its value heads, then their alphas
            beta, alpha = (a.ravel() for a in np.split((t("ssm_ba.weight") @ x).reshape(Nk, -1), 2, 1))
            head = np.arange(Nv) // (Nv // Nk)
        else: beta, alpha, head = t("ssm_beta.weight") @ x, t("ssm_alpha.weight") @ x, np.arange(Nv) % Nk
        beta, decay = sigmoid(beta), np.exp(t("ssm_a") * np.log1p(np.exp(alpha + t("ssm_dt.bias"))))
        o = np.zeros((Nv, S), self.dtype)
        for j in range(Nv):
            m, key = cache[1][j] * decay[j], k[head[j]]  # [key channel][value channel]
            m = m + np.outer(key, beta[j] * (v[j] - key @ m))
            cache[1][j], o[j] = m, q[head[j]] @ m
        z = (t("attn_gate.weight") @ x).reshape(Nv, S)
        return t("ssm_out.weight") @ (self.norm(o, t("ssm_norm.weight")) * llm.silu(z)).ravel()

    # ---- layers ----

    def feed_forward(self, t, x):
        swiglu = lambda gate, up, down: down @ (llm.silu(gate @ x) * (up @ x))
        matrices = lambda end: [t(f"ffn_{n}{end}.weight") for n in ("gate", "up", "down")]
        if t("ffn_gate_inp.weight") is None: return swiglu(*matrices(""))
        p = t("ffn_gate_inp.weight") @ x
        p = np.exp(p - p.max()) if self.gated else sigmoid(p)
        best = np.argsort(-(p if self.gated else p + t("exp_probs_b.bias")))[:self.get("expert_used_count")]
        share = p[best] / p[best].sum() * self.dtype(self.get("expert_weights_scale", 1))
        shared = swiglu(*matrices("_shexp")) * (sigmoid(t("ffn_gate_inp_shexp.weight") @ x) if self.gated else 1)
        return sum(w * swiglu(*(m[e] for m in matrices("_exps"))) for e, w in zip(best, share)) + shared

    def layer(self, i, x, cache):
        t = lambda name: self.w.get(f"blk.{i}.{name}")
        mix = self.latent if self.arch == "deepseek2" else self.delta_net if t("ssm_a") is not None else self.attention
        x = x + mix(t, self.norm(x, t("attn_norm.weight")), cache)
        ffn_norm = t("ffn_norm.weight") if self.arch == "deepseek2" else t("post_attention_norm.weight")
        return x + self.feed_forward(t, self.norm(x, ffn_norm))

    def rows(self, tokens):
        """The model's last rows, after output_norm."""
        caches, rows = [[] for _ in range(self.L)], []
        for token in tokens:
            x = self.w["token_embd.weight"][token]
            for i, cache in enumerate(caches): x = self.layer(i, x, cache)
            rows.append(self.norm(x, self.w["output_norm.weight"]))
        return rows

    def drafts(self, tokens, rows, follow):
        """After each token but the first: the logits of DRAFTED guesses, when the guesses before them are those of `follow`."""
        t = lambda name: self.w[f"blk.{self.L}.nextn.{name}.weight"]
        def read(row, token, cache):
            both = np.concatenate([self.norm(self.w["token_embd.weight"][token], t("enorm")), self.norm(row, t("hnorm"))])
            return self.norm(self.layer(self.L, t("eh_proj") @ both, cache), t("shared_head_norm"))
        cache, all_logits = [], []
        for at in range(1, len(tokens)):
            row = read(rows[at - 1], tokens[at], cache)
            logits, ahead = [self.output @ row], list(cache)
            for i in range(DRAFTED - 1):
                token = int(logits[-1].argmax()) if follow is None else follow[at - 1][i]
                row = read(row, token, ahead)
                logits.append(self.output @ row)
            all_logits.append(np.array(logits))
        return all_logits


def golden(tool, shape):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        subprocess.run([sys.executable, tool, *shape.replace("FILE", path).split()], check=True, stdout=subprocess.DEVNULL)
        exact, rough, unrounded = (Model(path, **how) for how in ({}, {"dtype": np.float32}, {"kv_f16": False}))
        tokens = [int(i) for i in np.random.default_rng(20261127).integers(0, 512, TOKENS)]
        logits = exact.drafts(tokens, exact.rows(tokens), None)
        chosen = [[int(row.argmax()) for row in rows] for rows in logits]
        others = [m.drafts(tokens, m.rows(tokens), chosen) for m in (rough, unrounded)]
    kept = []
    for at, rows in enumerate(logits):
        leads = []
        for i, row in enumerate(rows):
            best = np.sort(row)
            allowed = max(8 * np.abs(row - others[0][at][i]).max(), np.abs(row - others[1][at][i]).max() / 4)
            if best[-1] - best[-2] < 2 * allowed: break  # both of them may move
            leads.append(round(float((best[-1] - best[-2]) / np.abs(row).max()), 4))
        kept.append([at + 1, chosen[at][:len(leads)], leads])
    print(shape, "tokens that are certain:", sum(len(d) for _, d, _ in kept), "of", DRAFTED * len(kept))
    return {"model": shape, "tokens": tokens, "drafts": kept}


if __name__ == "__main__":
    with open(os.path.join(HERE, "draft_blocks.json"), "w") as f:
        json.dump([golden(sys.argv[1], shape) for shape in FILES], f)
        f.write("\n")
