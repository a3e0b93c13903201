// The client that most programs use, npm's package openai: openai.mjs COMMAND SOURCE_FOLDER
import assert from "node:assert/strict";
import { after, test } from "node:test";
import OpenAI from "openai";
import { Server, answer, chain, demo, numbers, question, schema, story, sum, watch } from "./server.mjs";

const server = await Server.start(demo);
const tools = await Server.start(chain, "--pool", "2048", "--retention", "none");
after(() => Promise.all([server.stop(), tools.stop()]));

// One finish_reason, after it at most the usage, then [DONE].
const streams = watch((text) => {
  const lines = text.split("\n").filter((line) => line.startsWith("data: "));
  assert.equal(lines.pop(), "data: [DONE]");
  const choices = lines.map((line) => JSON.parse(line.slice(6)).choices);
  if (choices.at(-1).length === 0) choices.pop();
  const reasons = choices.map(([choice]) => choice.finish_reason);
  assert.ok(reasons.pop());
  assert.deepEqual(new Set(reasons), new Set([null]));
});
const connect = (to, options) => new OpenAI({ baseURL: to.address + "/v1", apiKey: "secret", maxRetries: 0, ...options });
const client = connect(server, { fetch: streams });
const caller = connect(tools, { fetch: streams });
const ask = (fields) => client.chat.completions.create({ model: "any", messages: question, ...fields });

async function collect(stream) {
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

test("whole", async () => {
  const { choices } = await ask();
  assert.equal(choices[0].message.content, answer);
  assert.equal(choices[0].finish_reason, "stop");
});

test("streamed", async () => {
  const { text, usage } = await collect(await ask({ stream: true, stream_options: { include_usage: true } }));
  assert.deepEqual([text, usage.completion_tokens], [answer, 4]);
  assert.equal(await client.chat.completions.stream({ model: "any", messages: question }).finalContent(), answer);
  assert.equal(await streams.finish(), 2);
});

test("stop and length", async () => {
  for (const [fields, text, reason] of [[{ stop: "gen" }, "In Ber", "stop"], [{ stop: ["nowhere", "gen"] }, "In Ber", "stop"],
                                        [{ max_tokens: 2 }, "In Bergen", "length"]]) {
    const { choices } = await ask(fields);
    assert.deepEqual([choices[0].message.content, choices[0].finish_reason], [text, reason]);
    const runner = client.chat.completions.stream({ model: "any", messages: question, ...fields });
    const streamed = (await runner.finalChatCompletion()).choices[0];
    assert.deepEqual([streamed.message.content, streamed.finish_reason], [text, reason]);
  }
  assert.equal(await streams.finish(), 3);
});

test("completions and models", async () => {
  const fields = { model: "any", prompt: "The house", max_tokens: 3 };
  const whole = await client.completions.create(fields);
  assert.equal(whole.usage.completion_tokens, 3);
  let text = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
  assert.equal(await streams.finish(), 1);
  assert.equal((await client.models.list()).data.length, 1);
});

test("two at once get what each would alone", async () => {
  const questions = [question, [{ role: "user", content: "Harriet keeps the telescope in the attic. Where does Harriet keep it?" }]];
  const alone = [];
  for (const messages of questions) alone.push((await ask({ messages })).choices[0].message.content);
  const both = await Promise.all(questions.map(async (messages) => collect(await ask({ messages, stream: true }))));
  assert.deepEqual(both.map(({ text }) => text), alone);
  assert.equal(await streams.finish(), 2);
});

test("a tool is called, and its result read", async () => {
  const add = { type: "function", function: { name: "add", parameters: schema } };
  const fields = { model: "any", messages: sum, tools: [add] };
  const [{ message, finish_reason }] = (await caller.chat.completions.create(fields)).choices;
  assert.equal(finish_reason, "tool_calls");
  assert.deepEqual(message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]), [["add", numbers]]);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "3" };
  const { choices } = await caller.chat.completions.create({ ...fields, messages: [...sum, message, result] });
  assert.deepEqual([choices[0].message.content, choices[0].finish_reason], ["It is 3.", "stop"]);

  // The package's own loop: calls the function, and asks again.
  const called = [];
  const run = ({ a, b }) => String((called.push([a, b]), a + b));
  const running = { ...add, function: { ...add.function, function: run, parse: JSON.parse } };
  for (const stream of [false, true]) {
    const runner = caller.chat.completions.runTools({ ...fields, stream, tools: [running] });
    assert.equal(await runner.finalContent(), "It is 3.");
  }
  assert.deepEqual(called, [[1, 2], [1, 2]]);
  assert.equal(await streams.finish(), 2);
});

test("responses", async () => {
  const response = await connect(server).responses.create({ model: "any", input: question });
  assert.equal(response.output_text, answer);
  const stream = connect(server).responses.stream({ model: "any", input: question });
  let text = "";
  stream.on("response.output_text.delta", ({ delta }) => (text += delta));
  assert.equal((await stream.finalResponse()).output_text, answer);
  assert.equal(text, answer);
  const add = { type: "function", name: "add", parameters: schema };
  const { output } = await connect(tools).responses.create({ model: "any", input: sum, tools: [add] });
  assert.deepEqual([output[0].type, output[0].name, JSON.parse(output[0].arguments)], ["function_call", "add", numbers]);
  const result = { type: "function_call_output", call_id: output[0].call_id, output: "3" };
  const second = await connect(tools).responses.create({ model: "any", input: [...sum, ...output, result], tools: [add] });
  assert.equal(second.output_text, "It is 3.");
});

test("answers have their form", async () => {
  const only = { type: "object", properties: { a: { enum: [7] } }, required: ["a"], additionalProperties: false };
  const response_format = { type: "json_schema", json_schema: { name: "n", strict: true, schema: only } };
  const parsed = await connect(server).chat.completions.parse({ model: "any", messages: question, response_format });
  assert.deepEqual(parsed.choices[0].message.parsed, { a: 7 });
  const tool = { type: "function", function: { name: "add", parameters: only } };
  const called = await connect(tools).chat.completions.create({ model: "any", messages: sum, tools: [tool], tool_choice: "required" });
  assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { a: 7 });
});

test("errors have their classes", async () => {
  await assert.rejects(ask({ n: 17 }), OpenAI.BadRequestError);
  await assert.rejects(connect(server, { apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  await assert.rejects(client.post("/nowhere"), OpenAI.NotFoundError);
});

test("whoever leaves is served again", async () => {
  const other = connect(server); // the ends of its streams are not checked
  for await (const chunk of await other.chat.completions.create({ model: "any", messages: question, stream: true })) break;
  await server.idle();
  const controller = new AbortController();
  const reading = other.chat.completions.create({ model: "any", messages: story }, { signal: controller.signal });
  setTimeout(() => controller.abort(), 100);
  await assert.rejects(reading, OpenAI.APIUserAbortError);
  await server.idle();
  assert.equal((await ask()).choices[0].message.content, answer);
});
