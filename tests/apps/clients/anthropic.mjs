// npm's package @anthropic-ai/sdk: anthropic.mjs COMMAND SOURCE_FOLDER
import assert from "node:assert/strict";
import { after, test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { Server, answer, chain, demo, numbers, question, schema, story, sum, watch } from "./server.mjs";

const server = await Server.start(demo);
const tools = await Server.start(chain, "--pool", "2048", "--retention", "none");
after(() => Promise.all([server.stop(), tools.stop()]));

// One stop_reason, then the end, and nothing after it.
const streams = watch((text) => {
  const data = text.split("\n").filter((line) => line.startsWith("data: ")).map((line) => JSON.parse(line.slice(6)));
  assert.deepEqual(data.slice(-2).map(({ type }) => type), ["message_delta", "message_stop"]);
  assert.ok(data.at(-2).delta.stop_reason);
  for (const type of ["message_start", "message_delta", "message_stop"])
    assert.equal(data.filter((event) => event.type === type).length, 1);
});
const connect = (to, options) => new Anthropic({ baseURL: to.address, apiKey: "secret", maxRetries: 0, ...options });
const client = connect(server, { fetch: streams });
const caller = connect(tools, { fetch: streams });
const fields = { model: "any", max_tokens: 50, messages: question };
const text_of = ({ content }) => content.map((block) => block.text).join("");

test("whole", async () => {
  const message = await client.messages.create(fields);
  assert.deepEqual([text_of(message), message.stop_reason, message.usage.output_tokens], [answer, "end_turn", 4]);
});

test("streamed", async () => {
  const message = await client.messages.stream(fields).finalMessage();
  assert.deepEqual([text_of(message), message.stop_reason, message.usage.output_tokens], [answer, "end_turn", 4]);
  let text = "";
  for await (const event of await client.messages.create({ ...fields, stream: true }))
    if (event.type === "content_block_delta") text += event.delta.text;
  assert.equal(text, answer);
  assert.equal(await streams.finish(), 2);
});

test("stop sequences and length", async () => {
  for (const [limit, expected] of [[{ stop_sequences: ["gen"] }, ["In Ber", "stop_sequence", "gen"]],
                                   [{ max_tokens: 2 }, ["In Bergen", "max_tokens", null]]]) {
    for (const message of [await client.messages.create({ ...fields, ...limit }),
                           await client.messages.stream({ ...fields, ...limit }).finalMessage()])
      assert.deepEqual([text_of(message), message.stop_reason, message.stop_sequence], expected);
  }
  assert.equal(await streams.finish(), 2);
});

test("two at once get the same", async () => {
  const both = await Promise.all([0, 1].map(() => client.messages.stream(fields).finalMessage()));
  assert.deepEqual(both.map(text_of), [answer, answer]);
  assert.equal(await streams.finish(), 2);
});

test("a tool is called, and its result read", async () => {
  const asking = { ...fields, messages: sum, tools: [{ name: "add", input_schema: schema }] };
  for (const message of [await caller.messages.create(asking), await caller.messages.stream(asking).finalMessage()]) {
    assert.equal(message.stop_reason, "tool_use");
    const [{ type, id, name, input }, ...rest] = message.content;
    assert.deepEqual([type, name, input, rest], ["tool_use", "add", numbers, []]);
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: "3" }] };
    const messages = [...sum, { role: "assistant", content: message.content }, result];
    const second = await caller.messages.create({ ...asking, messages });
    assert.deepEqual([text_of(second), second.stop_reason], ["It is 3.", "end_turn"]);
  }
  assert.equal(await streams.finish(), 1);
});

test("a tool that must be called, and tokens that are counted", async () => {
  const only = { type: "object", properties: { a: { enum: [7] } }, required: ["a"], additionalProperties: false };
  const asking = { ...fields, messages: sum, tools: [{ name: "add", input_schema: only }] };
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "add" }]) {
    const { content } = await connect(tools).messages.create({ ...asking, tool_choice });
    assert.deepEqual(content.map(({ type, name, input }) => [type, name, input]), [["tool_use", "add", { a: 7 }]]);
  }
  const { input_tokens } = await client.messages.countTokens({ model: "any", messages: question });
  const { usage } = await client.messages.create(fields);
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("errors have their classes", async () => {
  await assert.rejects(client.messages.create({ ...fields, temperature: -1 }), Anthropic.BadRequestError);
  await assert.rejects(connect(server, { apiKey: "wrong" }).messages.create(fields), Anthropic.AuthenticationError);
});

test("whoever leaves is served again", async () => {
  const other = connect(server); // the ends of its streams are not checked
  for await (const event of await other.messages.create({ ...fields, stream: true })) break;
  await server.idle();
  const stream = other.messages.stream({ ...fields, messages: story });
  setTimeout(() => stream.abort(), 100);
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  await server.idle();
  assert.equal(text_of(await client.messages.create(fields)), answer);
});
