"""Sends thousands of invalid or abusive requests: serve_hostile.py COMMAND SOURCE_FOLDER COUNT

The server must answer each request correctly or close its connection, keep running, and stay within its budget and the fixed
addition to it. Meanwhile some clients hold 200 connections, and some send their bodies a few bytes at a time. Honest clients,
which retry if the queue is full, must get the same answers as without other clients.
"""
import json
import random
import socket
import struct
import sys
import threading
import time

from serve_client import BOOK, HEADS, Server, drain

COUNT = int(sys.argv[3]) if len(sys.argv) > 3 else 200
SEED = 20261123
CLIENTS, SLOW, HONEST = 8, 4, 2
HELD = 200  # connections; 256 are allowed
LARGEST = 1 << 20  # bytes of a body, with this budget
ALLOWED = (64 << 20) + (32 << 20)
QUESTION = {"messages": [{"role": "user", "content": "Sylvia works in Bergen. In which city does Sylvia work?"}]}
GOOD = "In Bergen."


def post(body, path=b"/v1/chat/completions", fields=b""):
    return (b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fields +
            b"Content-Length: %d\r\n\r\n" % len(body) + body)


def chat(**fields):
    return json.dumps({**QUESTION, **fields}).encode()


# Each function returns the bytes to send and the allowed statuses of the answer; None: the client does not
# wait for an answer.

def noise(r):
    return r.randbytes(r.randrange(1, 4000)), {b"400", b"431", b""}


def broken_line(r):
    line = r.choice([b"GET", b"GET / HTTP/9.9", b"\r\n\r\n\r\n", b"POST  HTTP/1.1", b"GET /health HTTP/1.1\r\nHost localhost",
                     b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 7",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
    return line + b"\r\n\r\n", {b"400", b"403", b"413", b"501", b"200", b""}


def mutated(r):
    body = bytearray(chat(max_tokens=3, stream=r.random() < 0.5))
    for _ in range(r.randrange(1, 6)):
        body[r.randrange(len(body))] = r.randrange(256)
    return post(bytes(body)), {b"200", b"400"}


def wrong_types(r):
    values = [None, True, -1, 0, 1e308, 2**63, "x", [], {}, [None], {"a": 1}, "\u0000", "x" * 500]
    fields = ["messages", "temperature", "top_p", "seed", "n", "stop", "max_tokens", "tools", "tool_choice", "stream_options",
              "logprobs", "top_logprobs", "response_format", "prompt", "system", "stop_sequences", "logit_bias"]
    path = r.choice([b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/tokenize"])
    if path == b"/v1/responses":
        fields = ["input", "instructions", "tools", "tool_choice", "reasoning", "text", "include", "max_output_tokens", "background"]
        body = {"input": r.choice(["a", QUESTION["messages"]]), "max_output_tokens": 2}
    else:
        body = {"messages": QUESTION["messages"], "prompt": "a", "max_tokens": 2}
    for name in r.sample(fields, r.randrange(1, 4)):
        body[name] = r.choice(values)
    length = "max_output_tokens" if path == b"/v1/responses" else "max_tokens"
    body[length] = 2 if not isinstance(body[length], (str, list)) else body[length]
    return post(json.dumps(body).encode(), path), {b"200", b"400"}


def forms(r):
    """Schemas and grammars that are wrong, or large, or endless."""
    n = r.randrange(1, 3000)
    deep = {"type": "integer"}
    for _ in range(r.randrange(1, 25)):
        deep = r.choice([{"type": "array", "items": deep}, {"anyOf": [deep, {"type": "null"}]}, {"type": "object", "properties": {"a": deep}}])
    schemas = [deep, {"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"enum": ["a" * (i % 50) + str(i) for i in range(n)]},
               {"type": "array", "minItems": n * 1000, "items": {"type": "integer"}}, {"type": "string", "minLength": n * 100, "maxLength": 10**9},
               {"type": "object", "properties": {str(i): {"type": ["string", "number", "null"]} for i in range(n)}},
               {"type": "string", "pattern": r.choice(["(a{1,1000}){1,1000}", "((a*)*)*b", "[", "^(a|b|ab)*$", "\\\\p{L}{" + str(n) + "}"])}, True, 1]
    grammars = ["root ::= root", 'root ::= root "a" | "b"', 'root ::= ("a" | "b"){1000}{1000}', "root ::= [^a]*", 'root ::= ' + '"a" ' * n,
                "root ::= " + "(" * n + '"a"' + ")" * n, "x", "root ::= x"]
    field = r.choice([{"guided_json": r.choice(schemas)}, {"grammar": r.choice(grammars)}, {"response_format": {"type": "json_object"}},
                      {"tools": [{"type": "function", "function": {"name": "f", "parameters": r.choice(schemas[:3])}}],  # which the model reads
                       "tool_choice": "required"}])
    return post(chat(max_tokens=5, temperature=r.choice([0, 2]), **field)), {b"200", b"400"}


def settings(r):
    values = [None, True, -1, 1e308, 2**63, "x", [], {}, "\u0000", "--pool=1", "x" * 500]
    fields = ["retention", "selection", "pool", "chunk", "mem-budget", "heads", "heads=/etc/passwd", "select-k", "positions", "", "="]
    body = {name: r.choice(values) for name in r.sample(fields, r.randrange(3))}
    body["retention"] = r.choice([*values, "window", "auto", "none"])
    data = json.dumps(body).encode()
    return post(data[:r.randrange(2 * len(data))], b"/thimble/settings", b"Content-Type: application/json\r\n"), {b"200", b"400", b"409"}


def deep(r):
    depth = r.randrange(70, 200000)
    return post(r.choice([b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth])), {b"400"}


def many_values(r):
    return post(b'{"messages":[' + b"0," * r.randrange(300000, 500000) + b"0]}"), {b"400"}


def large_announced(r):
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{" %
            r.randrange(17 << 20, 1 << 62)), {b"413"}


def long_header(r):
    return b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * r.randrange(16 << 10, 60 << 10), {b"431"}


def stranger(r):
    host = r.choice([b"evil.example", b"localhost.evil.example", b"127.0.0.1.nip.io", b"[", b"]", b"[::1", b":"])
    return b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n", {b"403", b"200"}


def half(r):
    whole = post(chat(stream=True))
    return whole[:r.randrange(1, len(whole) - 1)], None


def leaves(r):
    text = "word " * r.randrange(10, 20000)
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": r.random() < 0.5}).encode()
    return post(body), None


def large(r):
    """A text of the largest allowed size, which takes minutes to read; its client leaves."""
    text = (BOOK * 5)[:r.randrange(LARGEST // 2, LARGEST - 40000)]  # new lines and quotes take two bytes
    return post(json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()), None


def large_tokens(r):
    text = (BOOK * 5)[:r.randrange(LARGEST // 2, LARGEST - 40000)]
    return post(json.dumps({"content": text}, ensure_ascii=False).encode(), b"/tokenize"), {b"200"}


def too_large(r):
    return post(b" " * r.randrange(LARGEST + 1, 2 * LARGEST)), {b"413"}


def long_run(r):
    text = r.choice(["a", " ", "\n", "ab", "\u4e00"]) * r.randrange(LARGEST // 8 + 1, LARGEST // 4)
    return post(json.dumps({"content": text}, ensure_ascii=False).encode(), b"/tokenize"), {b"413"}


def good(r):
    return post(chat(seed=r.randrange(100))), {b"200"}


KINDS = [noise, broken_line, mutated, wrong_types, forms, settings, deep, many_values, large_announced, long_header, stranger, half, leaves,
         large, large_tokens, too_large, long_run, good]
WEIGHTS = [10, 10, 15, 20, 10, 10, 5, 2, 5, 5, 5, 10, 6, 1, 1, 2, 2, 8]


def send(server, kind, r, problems):
    data, allowed = kind(r)
    with server.connect(timeout=60) as connection:
        try:
            connection.sendall(data)
        except ConnectionError:
            pass  # refused before all was sent
        if allowed is None:
            time.sleep(r.random() * (0.3 if kind is large else 0.02))
            if r.random() < 0.5:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if kind in (noise, broken_line):  # may be the beginning of something
            connection.shutdown(socket.SHUT_WR)
        got = drain(connection)
        status = got[9:12] if got.startswith(b"HTTP/1.") else b""
        # The queue may be full, or large texts may take all the room.
        busy = (status == b"429" and b"200" in allowed) or (status == b"503" and b"fill the memory" in got)
        if status not in allowed and not busy:
            problems.append(f"{kind.__name__}: {status} for {data[:120]}: {got[:300]}")
        if kind is good and status == b"200" and GOOD.encode() not in got:
            problems.append(f"a good request got {got[-300:]}")


def honest(server, ended, waits, problems):
    """Repeats a question, each time until it is answered, and notes the seconds of each answer."""
    while not ended.is_set():
        start = time.monotonic()
        status = 429
        while status in (429, 503) and time.monotonic() - start < 60:
            status, _, body = server.ask("POST", "/v1/chat/completions", QUESTION)
            if status in (429, 503):  # what Retry-After says is a second; this one is impatient
                time.sleep(0.1)
        if status != 200 or body["choices"][0]["message"]["content"] != GOOD:
            problems.append(f"an honest client got {status}: {body}")
            return
        waits.append(time.monotonic() - start)


def slow(server, ended, seed, waits, problems):
    """Sends a good request a few bytes at a time."""
    r = random.Random(seed)
    while not ended.is_set():
        data = post(chat(seed=1))
        with server.connect(timeout=60) as connection:
            for at in range(0, len(data), 16):
                connection.sendall(data[at:at + 16])
                time.sleep(r.random() * 0.2)
            got = drain(connection)
        if got[9:12] == b"200" and GOOD.encode() in got:
            waits.append(len(data))
        elif got[9:12] != b"429":
            problems.append(f"a slow client got {got[:300]}")


def hold(server, ended):
    """Holds many connections, half of them with the beginning of a request."""
    held = []
    while not ended.is_set():
        open_still = []
        for connection in held:
            try:
                connection.recv(1000)
                connection.close()  # the end, or an error
            except BlockingIOError:
                open_still.append(connection)
            except ConnectionError:
                connection.close()
        held = open_still
        while len(held) < HELD:
            held.append(server.connect())
            if len(held) % 2:
                held[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            held[-1].setblocking(False)
        time.sleep(0.2)
    for connection in held:
        connection.close()


def main():
    server = Server("--device", "cpu", "--heads", HEADS, "--pool", "1024", "--mem-budget", "64MiB")
    problems, lock, left = [], threading.Lock(), list(range(COUNT))
    most = [server.anonymous_bytes()]

    def client():
        while True:
            with lock:
                if not left or problems:
                    return
                number = left.pop()
            r = random.Random(SEED + number)
            try:
                send(server, r.choices(KINDS, WEIGHTS)[0], r, problems)
            except Exception as error:
                problems.append(f"request {number}: {error!r}")
            if number % 20 == 0:
                most.append(server.anonymous_bytes())

    ended, waits, slow_ones = threading.Event(), [], []
    others = [threading.Thread(target=hold, args=(server, ended))]
    others += [threading.Thread(target=honest, args=(server, ended, waits, problems)) for _ in range(HONEST)]
    others += [threading.Thread(target=slow, args=(server, ended, SEED - i, slow_ones, problems)) for i in range(SLOW)]
    start = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in [*others, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    ended.set()
    for thread in others:
        thread.join()
    server.wait_until(lambda state: not any(slot["busy"] for slot in state["slots"]))
    answer = server.chat(QUESTION["messages"])["choices"][0]["message"]["content"]
    print(f"{COUNT - len(left)} requests in {seconds:.1f} s; anonymous memory at most {max(most) / 2**20:.1f} MiB, "
          f"allowed {ALLOWED / 2**20:.0f} MiB, at the end {server.anonymous_bytes() / 2**20:.1f} MiB")
    print(f"honest clients had {len(waits)} answers, the slowest after {max(waits):.1f} s; {len(slow_ones)} slow bodies were answered")
    print([line for line in server.get("/metrics").split("\n") if line.startswith("thimble_responses")])
    problems += ["no slow body was answered"] if not slow_ones else []
    problems += [f"it now answers {answer!r}"] if answer != GOOD else []
    problems += [f"{max(most)} bytes of memory"] if max(most) > ALLOWED else []
    code, _ = server.stop()
    problems += [f"it ended with {code}"] if code else []
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


main()
