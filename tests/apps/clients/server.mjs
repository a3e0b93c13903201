// The server under test, and the requests that its clients make.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";

const [command, source] = process.argv.slice(2);
export const demo = source + "/models/thimble-demo-28m-q8_0.gguf";
export const chain = "chain.gguf"; // written by tests/apps/serve_tools.py

export const question = [{ role: "user", content: "Sylvia works in Bergen. In which city does Sylvia work?" }];
export const answer = "In Bergen.";
// Reading it takes a while.
export const story = [{ role: "user", content: "Tell me a long story. ".repeat(2000) }];
export const sum = [{ role: "user", content: "What is 1 + 2?" }];
export const schema = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
export const numbers = { a: 1, b: 2 };

export class Server {
  static async start(model, ...flags) {
    const process_ = spawn(command, ["serve", "--device", "cpu", "-m", model, "--port", "0", "--api-key", "secret", ...flags]);
    process.on("exit", () => process_.kill()); // if a test fails
    let text = "";
    for await (const piece of process_.stderr) {
      const match = (text += piece).match(/http:\/\/\S+:\d+/);
      if (match) return new Server(process_, match[0]);
    }
    throw new Error("the server did not start: " + text);
  }
  constructor(process_, address) {
    this.process = process_;
    this.address = address;
  }
  async idle() {
    for (;;) {
      const response = await fetch(this.address + "/thimble/state", { headers: { "x-api-key": "secret" } });
      const { slots, queue } = await response.json();
      if (!queue.waiting && slots.every((slot) => !slot.busy)) return;
      await sleep(5);
    }
  }
  async stop() {
    const ended = new Promise((resolve) => this.process.on("exit", resolve));
    this.process.kill("SIGTERM");
    assert.equal(await ended, 0);
  }
}

// A fetch for a client that also passes each complete stream of events to `check`, in the form in which the
// server sent it.
export function watch(check) {
  const checked = [];
  const watched = async (url, init) => {
    const response = await fetch(url, init);
    if (!response.headers.get("content-type").startsWith("text/event-stream")) return response;
    const [ours, theirs] = response.body.tee();
    checked.push(new Response(ours).text().then(check));
    return new Response(theirs, response);
  };
  // The number of streams.
  watched.finish = async () => (await Promise.all(checked.splice(0))).length;
  return watched;
}
