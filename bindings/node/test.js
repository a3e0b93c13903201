// The Node binding's tests: `node --test`. THIMBLE_LIBRARY is the library, THIMBLE_LAYOUTS what layouts.py wrote, THIMBLE_ROOT the
// project's folder.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import test from 'node:test';
import koffi from 'koffi';
import { devices, Model, sessionFileInfo, sessionFileNote, ThimbleError } from 'thimble';
import { constants, lib, structs } from './c.js';

const root = process.env.THIMBLE_ROOT;
const inRoot = (path) => join(root, path);
const modelPath = inRoot('models/thimble-demo-28m-q8_0.gguf');
const book = readFileSync(inRoot('models/demo-book.txt'));
const options = { threads: 2, device: 'cpu', budgetBytes: 64 * 2 ** 20, retention: 'window', pool: 256, chunk: 128 };
const layouts = JSON.parse(readFileSync(process.env.THIMBLE_LAYOUTS));

function temporary(t) {
  const folder = mkdtempSync(join(tmpdir(), 'thimble-'));
  t.after(() => rmSync(folder, { recursive: true }));
  return folder;
}

test('structs are the header\'s', () => {
  const ours = Object.fromEntries(Object.entries(structs).map(([name, struct]) => [name, {
    size: koffi.sizeof(struct),
    fields: Object.fromEntries(Object.entries(koffi.type(struct).members).map(([field, { type, offset }]) =>
      [field, [offset, koffi.sizeof(type)]])),
  }]));
  assert.deepEqual(ours, layouts.structs);
});

test('constants and functions are the header\'s', () => {
  assert.deepEqual(constants, layouts.constants);
  assert.deepEqual(Object.keys(lib).sort(), layouts.functions.sort());
});

// ---- the conformance script ----

const camel = (name) => name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
const pick = (value, ...names) => Object.fromEntries(names.map((name) => [name, value[camel(name)]]));
const total = (shares) => shares.reduce((sum, share) => sum + share, 0);

class Runner {
  sessions = {};

  constructor(folder) {
    this.path = join(folder, 'session');
  }

  async run(step) {
    const session = step.do === 'create' ? undefined : this.sessions[step.session];
    try {
      return await this[step.do](step, session);
    } catch (error) {
      if (error instanceof ThimbleError) return { error: error.status };
      throw error;
    }
  }

  options(given) {
    const all = { device: 'cpu', ...given };
    if (all.heads) all.heads = this.heads;
    if (all.draft_model) all.draft_model = this.model;
    return Object.fromEntries(Object.entries(all).map(([name, value]) => [camel(name), value]));
  }

  position(session) {
    return pick(session.stats(), 'position');
  }

  open({ model, heads }) {
    this.model = new Model(inRoot(model));
    this.retainer = heads;
    this.heads = this.model.heads(inRoot(heads));
    return { warnings: this.model.warnings.length };
  }

  info() {
    this.shape = this.model.info();
    return pick(this.shape, 'layers', 'kv_heads', 'vocab', 'context_length', 'eos', 'parameters', 'architecture',
      'quantization', 'chat_format', 'window_layers');
  }

  tokenize({ text, bos, special }) {
    return { ids: [...this.model.tokenize(text, { bos, special })] };
  }

  detokenize({ ids, special }) {
    return { text: this.model.detokenize(ids, { special }) };
  }

  ends({ token }) {
    return { ends: this.model.tokenEnds(token) };
  }

  chat({ messages }) {
    return { text: this.model.chat(messages) };
  }

  plan({ options }) {
    const memory = this.model.plan(this.options(options));
    return { ...pick(memory, 'pool', 'capacity', 'chunk', 'budget', 'dense_bytes_per_token'), fits: memory.total <= memory.budget };
  }

  fits(options) {
    try {
      this.model.plan(this.options(options));
      return true;
    } catch (error) {
      if (error instanceof ThimbleError) return false;
      throw error;
    }
  }

  async refused({ options }) {
    try {
      await (await this.model.session(this.options(options))).close();
      return {};
    } catch (error) {
      const enough = options.budget_bytes + error.bytesMissing;
      return {
        code: error.code, name: error.status, says_why: error.message !== '',
        bytes_missing_is_enough: this.fits({ ...options, budget_bytes: enough }),
        a_byte_less_is_not: !this.fits({ ...options, budget_bytes: enough - 1 }),
      };
    }
  }

  largest_pool({ options }) {
    const pool = this.model.largestPool(this.options(options));
    return { fits: this.fits({ ...options, pool }), one_more_does_not: !this.fits({ ...options, pool: pool + 1 }) };
  }

  async create({ session, options }) {
    this.sessions[session] = await this.model.session(this.options(options));
    return this.position(this.sessions[session]);
  }

  async read({ file, bytes, text, piece, bos }, session) {
    const ids = this.model.tokenize(file ? readFileSync(inRoot(file)).subarray(0, bytes) : text, { bos });
    for (let at = 0; at < ids.length; at += piece ?? ids.length) await session.feed(ids.subarray(at, at + (piece ?? ids.length)));
    return this.position(session);
  }

  async step({ count }, session) {
    const tokens = [];
    let text = '';
    while (tokens.length < count) {
      tokens.push(await session.step());
      text += session.text(tokens.at(-1));
    }
    return { tokens, text };
  }

  async accept({ token }, session) {
    await session.accept(token);
    return this.position(session);
  }

  async flush(_, session) {
    await session.flush();
    return this.position(session);
  }

  reset(_, session) {
    session.reset();
    return this.position(session);
  }

  rewind({ position }, session) {
    session.rewind(position);
    return this.position(session);
  }

  interrupt(_, session) {
    session.interrupt();
    return { asked: true };
  }

  async score({ ids }, session) {
    return { logprobs: [...(await session.score(ids))] };
  }

  async logits(_, session) {
    const logits = await session.logits();
    return { count: logits.length, best: logits.indexOf(Math.max(...logits)) };
  }

  sample({ temperature, top_k: topK, seed }, session) {
    session.setSampler({ temperature, topK, seed });
    return { set: true };
  }

  grammar({ kind, text }, session) {
    const grammar = kind === 'none' ? null : this.model.grammar(kind, text);
    session.setGrammar(grammar);
    grammar?.close();
    return { set: true };
  }

  async clone({ as }, session) {
    this.sessions[as] = await session.clone();
    return this.position(this.sessions[as]);
  }

  async save({ note }, session) {
    await session.save(this.path, note);
    return { saved: true };
  }

  async restore(_, session) {
    await session.restore(this.path);
    return this.position(session);
  }

  saved() {
    return { position: sessionFileInfo(this.path).position, note: sessionFileNote(this.path).toString() };
  }

  kept({ layer, kv_head: kvHead, only_count: onlyCount }, session) {
    const positions = [...session.kept(layer, kvHead)];
    return onlyCount ? { count: positions.length } : { positions };
  }

  stored_by_position(_, session) {
    const stored = session.storedByPosition();
    return { count: stored.length, entries: Math.round(total(stored) * this.shape.layers * this.shape.kvHeads) };
  }

  kept_by_position(_, session) {
    const { kept, attended } = session.keptByPosition();
    return {
      count: kept.length, entries: Math.round(total(kept) * this.shape.layers * this.shape.kvHeads),
      attention_in_thousandths: Math.round(total(attended) * 1000),
    };
  }

  stats(_, session) {
    return pick(session.stats(), 'position', 'waiting', 'entries', 'evictions', 'generated', 'prefill_tokens');
  }

  decided(_, session) {
    return pick(session.options(), 'pool', 'chunk', 'stabilizers', 'local', 'protect_init', 'max_new', 'select_prefill');
  }

  memory(_, session) {
    const memory = session.memory();
    return { ...pick(memory, 'pool', 'capacity'), holds_some: memory.allocated > 0, within_the_budget: memory.allocated <= memory.budget };
  }

  async shrink({ pool }, session) {
    return { freed_some: (await session.shrink(pool)) > 0 };
  }

  async close({ session: name }, session) {
    delete this.sessions[name];
    await session.close();
    return { closed: true };
  }

  close_model() {
    this.model.close();
    this.heads.close();
    return { closed: true };
  }
}

// Numbers with a fraction may differ by a hundredth; everything else must be equal.
function same(given, expected) {
  if (typeof expected === 'number' && !Number.isInteger(expected)) return Math.abs(given - expected) <= 0.01;
  if (expected === null || typeof expected !== 'object') return given === expected;
  if (given === null || typeof given !== 'object' || Array.isArray(given) !== Array.isArray(expected)) return false;
  const names = Object.keys(expected);
  return names.length === Object.keys(given).length && names.every((name) => same(given[name], expected[name]));
}

test('every step of the conformance script gives what it says', async (t) => {
  const runner = new Runner(temporary(t));
  const script = JSON.parse(readFileSync(inRoot('bindings/conformance/script.json')));
  for (const step of script.steps) {
    const given = await runner.run(step);
    assert.ok(same(given, step.expect), `${JSON.stringify(step)}\n gave ${JSON.stringify(given)}`);
  }
});

// ---- what only this language has ----

test('an AbortSignal stops a reading, while the event loop turns, and the session goes on', async () => {
  const model = new Model(modelPath);
  const session = await model.session(options);
  const ids = model.tokenize(book, { bos: true });
  let turns = 0;
  const timer = setInterval(() => ++turns, 10);
  await assert.rejects(session.feed(ids, { signal: AbortSignal.timeout(300) }), { name: 'TimeoutError' });
  clearInterval(timer);
  assert.ok(turns > 2, `the event loop turned ${turns} times`);
  const { position, waiting } = session.stats();
  assert.ok(position - waiting < ids.length / 2);
  await assert.rejects(session.step({ signal: AbortSignal.abort() }), { name: 'AbortError' });
  session.reset();
  await session.feed(ids.subarray(0, 1000));
  assert.equal(typeof (await session.step()), 'number');
  await session.close();
  model.close();
});

test('an interrupted call goes on when it is repeated', async () => {
  const model = new Model(modelPath);
  const session = await model.session(options);
  const ids = model.tokenize(book).subarray(0, 2000);
  setTimeout(() => session.interrupt(), 50);
  // A busy machine may wake the timer after a reading has ended, so the session reads until it is stopped.
  let readings = 1;
  const readAgain = async () => {
    for (;; ++readings) await session.feed(ids);
  };
  await assert.rejects(readAgain(), { status: 'INTERRUPTED' });
  await session.feed(ids);
  assert.equal(session.stats().position, readings * ids.length);
  await session.close();
  model.close();
});

test('calls of one session wait for each other, close for all of them', async () => {
  const model = new Model(modelPath);
  const session = await model.session(options);
  model.close(); // the session holds it
  await session.feed([300, 301, 302]);
  for await (const piece of session.generate({ limit: 2 })) assert.ok(piece);
  const results = Promise.all([session.feed([300, 301, 302]), session.step(), session.step()]);
  await session.close();
  assert.equal((await results).length, 3);
  assert.throws(() => session.stats(), /closed/);
  assert.throws(() => model.info(), /closed/);
  await session.close();
});

test('options that there are not are refused', async () => {
  const model = new Model(modelPath);
  assert.throws(() => model.plan({ retention: 'everything' }), /retention/);
  assert.throws(() => model.plan({ budget: 1 }), /no option budget/);
  assert.throws(() => new Model('no-such-file.gguf'), { status: 'IO', code: 20, bytesMissing: 0 });
  const other = new Model(modelPath);
  const heads = other.heads(inRoot('models/thimble-demo-28m.locret.gguf'));
  await assert.rejects(model.session({ heads }), /another model/);
});

test('the example streams an answer', (t) => {
  const text = join(temporary(t), 'text.txt');
  writeFileSync(text, book.subarray(0, 4000));
  const answer = execFileSync(process.execPath, ['example.js', modelPath, text], { encoding: 'utf8' });
  assert.ok(answer.startsWith('rilled with the thought of'), answer);
});

test('the processor is among the devices', () => {
  assert.ok(devices().some(({ name }) => name === 'cpu'));
});
