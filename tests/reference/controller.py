#!/usr/bin/env python3
"""What a controller of ADORE computes, and the labels it learns, by their definitions: controller.json.

The controller: PyTorch's GRU and what follows it, token by token. The labels: of each query, layer and query head the BEST / 2
entries with most attention, its own among them; the BEST tokens that are counted most often, of equals the larger position.
Texts are chosen so that no such decision hangs on less than MARGIN of a logit, which is more than f32 and halves move it.
"""
import json, os
import numpy as np
import labels, llm

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT, BEST, QUERIES, MARGIN = 80, 12, 2, 2**-8
INPUTS, WIDTH, TOKENS = 4, 3, 9


def parameters(random):
    w, d = WIDTH, INPUTS
    shapes = {"gru.weight_ih": (3 * w, d), "gru.bias_ih": (3 * w,), "gru.weight_hh": (3 * w, w), "gru.bias_hh": (3 * w,),
              "position.weight": (w,), "position.bias": (w,), "interaction.weight": (w, w), "interaction.bias": (w,),
              "output.weight": (w,), "output.bias": (1,)}
    return {name: np.round(random.normal(size=shape), 3) for name, shape in shapes.items()}


def states(p, xs):
    s, w, h, all = lambda a: 1 / (1 + np.exp(-a)), WIDTH, np.zeros(WIDTH), []
    for x in xs:
        i, r = p["gru.weight_ih"] @ x + p["gru.bias_ih"], p["gru.weight_hh"] @ h + p["gru.bias_hh"]
        reset, update = s(i[:w] + r[:w]), s(i[w:2 * w] + r[w:2 * w])
        h = (1 - update) * np.tanh(i[2 * w:] + reset * r[2 * w:]) + update * h
        all.append(h)
    return all


def score(p, state, age):
    inner = p["position.weight"] * np.log2(1 + age) / 12 + p["position.bias"] + state
    return float(p["output.weight"] @ np.tanh(p["interaction.weight"] @ inner + p["interaction.bias"]) + p["output.bias"][0])


def controller():
    random = np.random.default_rng(0)
    p, table = parameters(random), np.round(random.normal(size=(5, INPUTS)), 3)
    rows = random.integers(5, size=TOKENS).tolist()
    queries = [{"position": 3, "best": [0, 2]}, {"position": 7, "best": [2, 5, 6]}, {"position": 9, "best": [0, 8]}]
    z, losses = states(p, table[rows]), []
    for query in queries:
        n = query["position"]
        query["logits"] = [score(p, z[i], n - i) for i in range(n)]
        for i, x in enumerate(query["logits"]):
            chance = 1 / (1 + np.exp(-x))
            losses.append(-np.log(chance if i in query["best"] else 1 - chance))
    return {"parameters": {name: v.ravel().tolist() for name, v in p.items()}, "embeddings": table.ravel().tolist(), "rows": rows,
            "queries": queries, "loss": float(np.mean(losses))}


def attended(m, ids, query):
    """The positions with label 1 of a query, and the smallest margin of the decisions about entries."""
    counts, margin, g = np.zeros(query + 1, int), np.inf, m.H // m.Hkv
    for _, q, k, _ in labels.attention_inputs(m, ids):
        for head in range(m.H):
            logits = k[head // g][:query + 1] @ q[head][query]
            order = np.lexsort((-np.arange(query + 1), -logits))
            margin = min(margin, logits[order[BEST // 2 - 1]] - logits[order[BEST // 2]])
            counts[order[:BEST // 2]] += 1
    return sorted(np.lexsort((-np.arange(query + 1), -counts))[:BEST].tolist()), margin


def text_labels(name):
    m = llm.Model(os.path.join(HERE, name))
    for seed in range(1000):
        random = np.random.default_rng(seed)
        ids = random.integers(64, size=TEXT)
        queries = sorted(random.choice(np.arange(BEST, TEXT), QUERIES, replace=False).tolist())
        found = [attended(m, ids, query) for query in queries]
        if min(margin for _, margin in found) > MARGIN:
            return {"model": name, "text": ids.tolist(), "queries": [{"position": q, "best": b} for q, (b, _) in zip(queries, found)]}
    raise ValueError(f"{name}: no text whose labels are certain")


def main():
    names = ("tiny-qwen3.gguf", "tiny-biases.gguf", "tiny-llama3.gguf")
    out = {"controller": controller(), "best": BEST, "labels": [text_labels(name) for name in names]}
    json.dump(out, open(os.path.join(HERE, "controller.json"), "w"), separators=(",", ":"))


if __name__ == "__main__":
    main()
