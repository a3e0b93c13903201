// The client that most programs use, npm's package openai, against thimble serve:
//   node serve_openai.mjs COMMAND SOURCE_FOLDER, with the package in a node_modules beside or above the working folder
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const OpenAI = (await import(pathToFileURL(createRequire(process.cwd() + "/").resolve("openai")))).default.OpenAI;

const [command, source] = process.argv.slice(2);
const model = source + "/models/thimble-demo-28m-q8_0.gguf";
const server = spawn(command, ["serve", "--device", "cpu", "-m", model, "--port", "0", "--api-key", "secret", "--slots", "1"]);
process.on("exit", () => server.kill());
const port = await new Promise((found) => {
  let text = "";
  server.stderr.on("data", (piece) => {
    const match = (text += piece).match(/http:\/\/\S+:(\d+)/);
    if (match) found(match[1]);
  });
});
const client = new OpenAI({ baseURL: `http://127.0.0.1:${port}/v1`, apiKey: "secret", maxRetries: 0 });
const messages = [{ role: "user", content: "Sylvia works in Bergen. In which city does Sylvia work?" }];
const answer = "In Bergen.";

const whole = await client.chat.completions.create({ model: "any", messages });
assert.equal(whole.choices[0].message.content, answer);
assert.equal(whole.choices[0].finish_reason, "stop");

const stream = await client.chat.completions.create({ model: "any", messages, stream: true, stream_options: { include_usage: true } });
let text = "", reasons = [], usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  if (chunk.choices[0]?.finish_reason) reasons.push(chunk.choices[0].finish_reason);
  usage = chunk.usage ?? usage;
}
assert.deepEqual([text, reasons, usage.completion_tokens], [answer, ["stop"], 4]);

const runner = client.chat.completions.stream({ model: "any", messages });
assert.equal(await runner.finalContent(), answer);

const completion = await client.completions.create({ model: "any", prompt: "The house", max_tokens: 3 });
assert.equal(completion.usage.completion_tokens, 3);
assert.equal((await client.models.list()).data.length, 1);

await assert.rejects(client.chat.completions.create({ model: "any", messages, n: 2 }), OpenAI.BadRequestError);
await assert.rejects(new OpenAI({ baseURL: client.baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);

const abandoned = await client.chat.completions.create({ model: "any", stream: true, messages: [{ role: "user", content: "Tell me a long story." }] });
for await (const chunk of abandoned) break;  // which aborts the request
assert.equal((await client.chat.completions.create({ model: "any", messages })).choices[0].message.content, answer);

server.kill("SIGTERM");
assert.equal(await new Promise((ended) => server.on("exit", ended)), 0);
console.log("npm's openai and thimble serve understand each other");
process.exit(0);
