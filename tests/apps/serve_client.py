"""The server under test, and clients for it. Needs only the standard library."""
import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

COMMAND, SOURCE = sys.argv[1:3]
MODEL = SOURCE + "/models/thimble-demo-28m-q8_0.gguf"
HEADS = SOURCE + "/models/thimble-demo-28m.heads.gguf"
with open(SOURCE + "/models/demo-book.txt", encoding="utf-8") as file:
    BOOK = file.read()
# Run on the CPU, even if there are GPUs.
ENVIRONMENT = dict(os.environ, CUDA_VISIBLE_DEVICES="", VK_ICD_FILENAMES="/nowhere")


def thimble(*arguments, text=""):
    """Returns the command's output."""
    return subprocess.run([COMMAND, *arguments], input=text, capture_output=True, text=True, check=True,
                          env=ENVIRONMENT).stdout


class Server:
    """thimble serve on its own port."""

    def __init__(self, *flags, model=MODEL):
        self.process = subprocess.Popen([COMMAND, "serve", "-m", model, "--port", "0", *flags],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        atexit.register(self.process.kill)  # where a test fails in the middle
        self.first_lines = []
        for line in self.process.stderr:
            self.first_lines.append(line)
            found = re.search(r"http://\S+:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                return
        raise RuntimeError("the server did not start: " + "".join(self.first_lines))

    def stop(self, with_signal=signal.SIGTERM):
        """Stops the server. Returns the exit code and the seconds that this took."""
        start = time.monotonic()
        self.process.send_signal(with_signal)
        code = self.process.wait(timeout=20)
        self.process.stderr.close()
        return code, time.monotonic() - start

    def connect(self, timeout=60):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def ask(self, method, path, body=None, headers=None, timeout=60):
        """Returns the status, headers and body of a response. The body is parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read()
            is_json = response.headers.get("Content-Type") == "application/json"
            return response.status, response.headers, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def get(self, path):
        return self.ask("GET", path)[2]

    def chat(self, messages, path="/v1/chat/completions", **fields):
        """Returns the JSON of a response; fails on an error."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        status, _, body = self.ask("POST", path, {"messages": messages, **fields})
        assert status == 200, body
        return body

    def set(self, **settings):
        """Returns the status and body of the answer to POST /thimble/settings; select_k is "select-k"."""
        body = {name.replace("_", "-"): value for name, value in settings.items()}
        status, _, answer = self.ask("POST", "/thimble/settings", body, {"Content-Type": "application/json"})
        return status, answer

    def begin(self, body, path="/v1/chat/completions"):
        """Sends this body. Returns the socket on which the answer comes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def stream(self, body, path="/v1/chat/completions"):
        """Returns all lines of a stream of events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        lines = response.read().decode().split("\n")
        connection.close()
        assert response.status == 200, lines
        return lines

    def state(self):
        return self.get("/thimble/state")

    def busy(self):
        return sum(slot["busy"] for slot in self.state()["slots"])

    def wait_until(self, condition, seconds=20):
        """Returns the seconds until a condition on the state holds."""
        start = time.monotonic()
        while not condition(self.state()):
            assert time.monotonic() - start < seconds, "the server never came to that: " + str(self.state())
            time.sleep(0.002)
        return time.monotonic() - start

    def anonymous_bytes(self):
        """The memory of the process that is not backed by a file."""
        return self.memory_of("RssAnon")

    def memory_of(self, kind):
        """Bytes of memory under the system's name for a kind of memory."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return int(re.search(kind + r":\s+(\d+) kB", status.read()).group(1)) * 1024


def drain(connection, limit=1 << 20):
    """Returns the bytes that come until the other side closes or sends nothing more."""
    got = b""
    try:
        while len(got) < limit:
            piece = connection.recv(65536)
            if not piece:
                break
            got += piece
    except (ConnectionError, socket.timeout):
        pass
    return got


def events(lines):
    """Returns the data of a stream: JSON objects, and the word that ends it."""
    data = [line[6:] for line in lines if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
