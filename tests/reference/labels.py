#!/usr/bin/env python3
"""Labels of KVzip and KVzip+ for two tiny models, by their definitions and a softmax over everything: labels.json.

KVzip+ (Jegou and Jeblick, KVzap): text, instruction and text are one sequence. Of its causal softmax A the rows of the second
copy count, a = A[h][p][t] / |x_p| |Wo_h v_t|, x being what W_q reads; the label of the text's token t is ln max a over the
heads of a group and those rows. KVzip (Kim et al.): each chunk of the text is repeated by itself after the whole text; the
softmax is over the first tokens, the chunk and the repetition alone, and all its rows count; the label is ln max.
"""
import json, os
import numpy as np
import llm

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT, CHUNK, SINKS = 90, 40, 4


def attention_inputs(m, ids):
    """Of each layer x [n][d], rotated q [H][n][dh] and k [Hkv][n][dh] (as halves), and v [Hkv][n][dh], read densely."""
    n, g = len(ids), m.H // m.Hkv
    silu = lambda a: a / (1 + np.exp(-a))
    halves = lambda a: a.astype(np.float16).astype(np.float64)
    h, layers, at = m.embedding[ids], [], np.arange(len(ids))
    for b in m.layers:
        linear = lambda a, name: a @ b[name].T + (0 if b.get(name + "_bias") is None else b[name + "_bias"])
        x = m.norm(h, b["attn_norm"])
        q, k, v = (linear(x, "attn_" + c).reshape(n, -1, m.dh).transpose(1, 0, 2) for c in "qkv")
        if b["attn_q_norm"] is not None: q, k = m.norm(q, b["attn_q_norm"]), m.norm(k, b["attn_k_norm"])
        q, k = m.rotate(q, at), halves(m.rotate(k, at))
        layers.append((x, q, k, v))
        out = np.empty((m.H, n, m.dh))
        for i in range(m.H): out[i] = softmax(q[i] @ k[i // g].T, m.dh, at[None, :] <= at[:, None]) @ halves(v[i // g])
        h = h + linear(out.transpose(1, 0, 2).reshape(n, -1), "attn_output")
        x = m.norm(h, b["ffn_norm"])
        h = h + (silu(x @ b["ffn_gate"].T) * (x @ b["ffn_up"].T)) @ b["ffn_down"].T
    return layers


def softmax(products, dh, seen):
    a = np.exp(products / np.sqrt(dh)) * seen
    return a / a.sum(1, keepdims=True)


def kvzip_plus(m, text, instruction):
    """ids of the tail, which of its rows count, labels [layer][kv head][t]."""
    n, g, ids = len(text), m.H // m.Hkv, np.concatenate([text, instruction, text])
    at, second, labels = np.arange(len(ids)), np.arange(len(ids)) >= n + len(instruction), []
    for b, (x, q, k, v) in zip(m.layers, attention_inputs(m, ids)):
        y = np.zeros((m.Hkv, n))
        for i in range(m.H):
            a = softmax(q[i] @ k[i // g].T, m.dh, at[None, :] <= at[:, None])[second][:, :n]
            a = a / np.linalg.norm(x[second], axis=1)[:, None]
            a = a * np.linalg.norm(v[i // g][:n] @ b["attn_output"][:, i * m.dh:(i + 1) * m.dh].T, axis=1)[None, :]
            y[i // g] = np.maximum(y[i // g], a.max(0))
        labels.append(np.log(y))
    return ids[n:], second[n:], np.array(labels)


def kvzip(m, text, first, end, instruction):
    """ids of the tail, labels [layer][kv head][end - first] of the chunk."""
    n, g, ids = len(text), m.H // m.Hkv, np.concatenate([text, instruction, text[first:end]])
    at, labels = np.arange(len(ids)), []
    inside = (at < min(SINKS, first)) | ((at >= first) & (at < end)) | (at >= n)
    for x, q, k, v in attention_inputs(m, ids):
        y = np.zeros((m.Hkv, end - first))
        for i in range(m.H):
            a = softmax(q[i] @ k[i // g].T, m.dh, (at[None, :] <= at[:, None]) & inside[None, :])
            y[i // g] = np.maximum(y[i // g], a[n:, first:end].max(0))
        labels.append(np.log(y))
    return ids[n:], np.concatenate(labels, 0).reshape(m.L, m.Hkv, -1)


def main():
    cases, listed = [], lambda a: [round(float(v), 5) for v in np.ravel(a)]
    for seed, name in enumerate(("tiny-qwen3.gguf", "tiny-biases.gguf")):
        m, random = llm.Model(os.path.join(HERE, name)), np.random.default_rng(seed)
        text, instruction = random.integers(64, size=TEXT), random.integers(64, size=7)
        ids, second, labels = kvzip_plus(m, text, instruction)
        tail = {"tokens": ids.tolist(), "marked": second.astype(int).tolist(), "sinks": 0, "first": 0, "end": TEXT}
        cases.append({"model": name, "weighed": True, "text": text.tolist(), "tails": [tail], "labels": listed(labels)})
        tails, parts = [], []
        for first in range(0, TEXT, CHUNK):
            end = min(first + CHUNK, TEXT)
            ids, part = kvzip(m, text, first, end, instruction[:3 if first else 7])
            tails.append({"tokens": ids.tolist(), "marked": [1] * len(ids), "sinks": min(SINKS, first), "first": first, "end": end})
            parts.append(part)
        cases.append({"model": name, "weighed": False, "text": text.tolist(), "tails": tails, "labels": listed(np.concatenate(parts, 2))})
    json.dump(cases, open(os.path.join(HERE, "labels.json"), "w"), separators=(",", ":"))


if __name__ == "__main__":
    main()
