// Read texts far longer than memory with a language model, inside a byte budget. index.d.ts documents what is here, thimble.h
// what the calls mean.
import { call, callAsync, constants, floatsAt, initialised, lib, sized, ThimbleError, twoCalls } from './c.js';

export { ThimbleError };

export const version = () => lib.thimble_version();
export const buildInfo = () => lib.thimble_build_info();

// ---- values: fields of the header's structs in camel case ----

const camel = (name) => name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

function filled(struct, name, ...args) {
  const value = sized(struct);
  call(name, ...args, value);
  const entries = Object.entries(value).filter(([field]) => field !== 'struct_size' && field !== 'reserved');
  return Object.fromEntries(entries.map(([field, content]) => [camel(field), content]));
}

// Options that are words here and numbers in C, with the prefix of the constants.
const words = {
  retention: 'THIMBLE_RETENTION_', selection: 'THIMBLE_SELECTION_', retain_scope: 'THIMBLE_RETAIN_', vote: 'THIMBLE_VOTE_',
  vote_scale: 'THIMBLE_SCALE_', positions: 'THIMBLE_POSITIONS_', draft: 'THIMBLE_DRAFT_', recall_format: 'THIMBLE_KV_',
  key_format: 'THIMBLE_KV_', value_format: 'THIMBLE_KV_',
};
const hidden = ['struct_size', 'reserved', 'progress', 'progress_user'];

function given(struct, values, convert = (_, value) => value) {
  const options = initialised(struct);
  for (const [name, value] of Object.entries(values)) {
    const field = snake(name);
    if (!(field in options) || hidden.includes(field)) throw new TypeError(`there is no option ${name}`);
    if (value !== undefined) options[field] = convert(field, value);
  }
  return options;
}

function sessionOptions(values, model) {
  return given('thimble_session_options', values, (field, value) => {
    if (field in words) {
      const number = constants[words[field] + String(value).toUpperCase()];
      if (number === undefined) throw new TypeError(`${camel(field)} cannot be "${value}"`);
      return number;
    }
    if (field === 'recall' && value === 'all') return constants.THIMBLE_RECALL_ALL;
    if (field !== 'heads' && field !== 'draft_model') return value;
    if (field === 'heads' && value.model !== model) throw new TypeError('these heads were opened for another model');
    return pointerOf(value);
  });
}

// The word of an option's number.
function word(field, number) {
  const prefix = words[field];
  const name = Object.keys(constants).find((constant) => constant.startsWith(prefix) && constants[constant] === number);
  return name.slice(prefix.length).toLowerCase();
}

const buffer = (text) => (typeof text === 'string' ? Buffer.from(text) : text);
const ids = (tokens) => (tokens instanceof Int32Array ? tokens : Int32Array.from(tokens));
const bytes = (attempt) => twoCalls((size) => Buffer.alloc(size), attempt);
const textOf = (attempt) => bytes(attempt).toString();

// ---- handles ----

// What owns a pointer of the library's. It is freed when its object was closed, or collected, and nothing needs it any more.
class Owner {
  users = 1;
  closed = false;
  constructor(pointer, free, needs) {
    Object.assign(this, { pointer, free, needs });
    for (const owner of needs) ++owner.users;
  }
  close() {
    if (this.closed) return;
    this.closed = true;
    this.drop();
  }
  drop() {
    if (--this.users) return;
    lib[this.free](this.pointer);
    this.pointer = null;
    for (const owner of this.needs) owner.drop();
  }
}

const collected = new FinalizationRegistry((owner) => owner.close());
const owners = new WeakMap();

function own(object, pointer, free, ...needs) {
  const owner = new Owner(pointer, free, needs.map((needed) => owners.get(needed)));
  owners.set(object, owner);
  collected.register(object, owner, owner);
}

function pointerOf(object) {
  const owner = owners.get(object);
  if (owner.closed) throw new Error(`this ${object.constructor.name} is closed`);
  return owner.pointer;
}

function close(object) {
  collected.unregister(owners.get(object));
  owners.get(object).close();
}

export class Model {
  constructor(path) {
    this.warnings = [];
    const options = initialised('thimble_model_options');
    options.log = (_, message) => this.warnings.push(message);
    const pointer = [null];
    call('thimble_model_open', path, options, pointer);
    own(this, pointer[0], 'thimble_model_free');
  }

  info() {
    return filled('thimble_model_info', 'thimble_model_get_info', pointerOf(this));
  }

  tokenize(text, { bos = false, special = false } = {}) {
    const data = buffer(text);
    const flags = (bos ? constants.THIMBLE_TOKENIZE_ADD_BOS : 0) | (special ? constants.THIMBLE_TOKENIZE_PARSE_SPECIAL : 0);
    return twoCalls((count) => new Int32Array(count), (tokens, capacity, count) =>
      call('thimble_tokenize', pointerOf(this), data, data.length, flags, tokens, null, capacity, count));
  }

  detokenize(tokens, { special = false } = {}) {
    const list = ids(tokens);
    const flags = special ? constants.THIMBLE_DETOKENIZE_SPECIAL : 0;
    return textOf((text, capacity, length) =>
      call('thimble_detokenize', pointerOf(this), list, list.length, flags, text, capacity, length));
  }

  tokenEnds(token) {
    return lib.thimble_token_ends(pointerOf(this), token) !== 0;
  }

  chat(messages, { assistant = true, held = 0, format, template, variables } = {}) {
    const options = initialised('thimble_chat_options');
    const put = (field, text) => {
      options[field] = text;
      options[`${field}_length`] = Buffer.byteLength(text);
    };
    options.flags = assistant ? constants.THIMBLE_CHAT_ADD_ASSISTANT : 0;
    options.held = held;
    if (format !== undefined) options.format = format;
    if (template !== undefined) put('source', template);
    if (variables !== undefined) put('variables', JSON.stringify(variables));
    put('messages_json', JSON.stringify(messages));
    return textOf((text, capacity, length) =>
      call('thimble_chat_render', pointerOf(this), options, text, capacity, length));
  }

  heads(path) {
    return new Heads(this, path);
  }

  grammar(kind, text) {
    return new Grammar(this, kind, text);
  }

  plan(options = {}) {
    const given = sessionOptions(options, this);
    return filled('thimble_memory', 'thimble_session_plan', pointerOf(this), given);
  }

  largestPool(options = {}) {
    const pool = [0];
    call('thimble_session_largest_pool', pointerOf(this), sessionOptions(options, this), pool);
    return pool[0];
  }

  async session(options = {}) {
    const pointer = [null];
    const model = owners.get(this);
    const args = [pointerOf(this), sessionOptions(options, this), pointer];
    const lent = [model, ...[options.heads, options.draftModel].filter(Boolean).map((object) => owners.get(object))];
    for (const owner of lent) ++owner.users; // until the call has ended
    try {
      await callAsync('thimble_session_create', ...args);
      return new Session(this, pointer[0]);
    } finally {
      for (const owner of lent.reverse()) owner.drop();
    }
  }

  close() {
    close(this);
  }
}

export class Heads {
  constructor(model, path) {
    const pointer = [null];
    call('thimble_heads_open', pointerOf(model), path, pointer);
    this.model = model;
    own(this, pointer[0], 'thimble_heads_free', model);
  }

  get retention() {
    const number = lib.thimble_heads_retention(pointerOf(this));
    const name = Object.keys(constants).find((key) => key.startsWith(words.retention) && constants[key] === number);
    return name.slice(words.retention.length).toLowerCase();
  }

  close() {
    close(this);
  }
}

export class Grammar {
  constructor(model, kind, text) {
    if (!['json_schema', 'regex', 'gbnf'].includes(kind)) throw new RangeError(`kind cannot be ${kind}`);
    const bytes = Buffer.from(typeof text === 'string' ? text : JSON.stringify(text));
    const pointer = [null];
    call(`thimble_grammar_create_${kind}`, pointerOf(model), bytes, bytes.length, pointer);
    own(this, pointer[0], 'thimble_grammar_free');
  }

  close() {
    close(this);
  }
}

export class Session {
  #turn = Promise.resolve(); // ends when no call runs on a worker thread
  #stoppedLate = false; // an interrupt came after its call had ended; the next call must not fail because of it

  constructor(model, pointer) {
    this.model = model;
    own(this, pointer, 'thimble_session_free', model);
  }

  // A call on a worker thread, after the earlier ones; aborting the signal interrupts it.
  #run(signal, name, ...args) {
    const run = async () => {
      signal?.throwIfAborted();
      let stopped = false;
      const stop = () => {
        stopped = true;
        this.interrupt();
      };
      signal?.addEventListener('abort', stop, { once: true });
      try {
        await callAsync(name, pointerOf(this), ...args);
        this.#stoppedLate ||= stopped;
      } catch (error) {
        if (error.status !== 'INTERRUPTED') {
          this.#stoppedLate ||= stopped;
          throw error;
        }
        if (stopped) throw signal.reason;
        if (!this.#stoppedLate) throw error;
        this.#stoppedLate = false;
        await callAsync(name, pointerOf(this), ...args);
      } finally {
        signal?.removeEventListener('abort', stop);
      }
    };
    const result = this.#turn.then(run);
    this.#turn = result.catch(() => {});
    return result;
  }

  async feed(tokens, { signal } = {}) {
    const list = ids(tokens);
    await this.#run(signal, 'thimble_session_feed', list, list.length);
  }

  async flush({ signal } = {}) {
    await this.#run(signal, 'thimble_session_flush');
  }

  async step({ signal } = {}) {
    const token = [0];
    await this.#run(signal, 'thimble_session_step', token);
    return token[0];
  }

  async accept(token, { signal } = {}) {
    await this.#run(signal, 'thimble_session_accept', token);
  }

  text(token) {
    // The first call with enough room takes the token, so a call that only asks for the length is not possible.
    for (let capacity = 256, length = [0]; ; capacity = length[0]) {
      const text = Buffer.alloc(capacity);
      try {
        call('thimble_session_text', pointerOf(this), token, text, capacity, length);
        return text.toString('utf8', 0, length[0]);
      } catch (error) {
        if (length[0] <= capacity) throw error;
      }
    }
  }

  async *generate({ limit = Infinity, signal } = {}) {
    for (let made = 0; made < limit; ++made) {
      const token = await this.step({ signal });
      if (lib.thimble_token_ends(owners.get(this.model).pointer, token)) return; // this session keeps a closed model alive
      const piece = this.text(token);
      if (piece) yield piece;
    }
  }

  async logits() {
    const pointer = [null];
    const count = [0];
    await this.#run(undefined, 'thimble_session_logits', pointer, count);
    return floatsAt(pointer[0], count[0]);
  }

  async score(tokens, { signal } = {}) {
    const list = ids(tokens);
    const logprobs = new Float32Array(list.length);
    await this.#run(signal, 'thimble_session_score', list, list.length, logprobs);
    return logprobs;
  }

  rewind(position) {
    call('thimble_session_rewind', pointerOf(this), position);
  }

  reset() {
    call('thimble_session_reset', pointerOf(this));
  }

  async clone() {
    const pointer = [null];
    await this.#run(undefined, 'thimble_session_clone', pointer);
    return new Session(this.model, pointer[0]);
  }

  interrupt() {
    lib.thimble_session_interrupt(pointerOf(this));
  }

  kept(layer, kvHead) {
    return twoCalls((count) => new Int32Array(count), (positions, capacity, count) =>
      call('thimble_session_kept', pointerOf(this), layer, kvHead, positions, capacity, count));
  }

  keptByPosition({ attended = true } = {}) {
    let attention = new Float32Array(0);
    const kept = twoCalls((count) => {
      if (attended) attention = new Float32Array(count);
      return new Float32Array(count);
    }, (shares, capacity, count) =>
      call('thimble_session_kept_by_position', pointerOf(this), shares, shares && attended ? attention : null, capacity, count));
    return { kept, attended: attention };
  }

  storedByPosition() {
    return twoCalls((count) => new Float32Array(count), (shares, capacity, count) =>
      call('thimble_session_stored_by_position', pointerOf(this), shares, capacity, count));
  }

  setSampler(sampler) {
    call('thimble_session_set_sampler', pointerOf(this), given('thimble_sampler_options', sampler));
  }

  setBias(tokens, biases) {
    if (tokens.length !== biases.length) throw new RangeError('each token needs a bias');
    call('thimble_session_set_bias', pointerOf(this), Int32Array.from(tokens), Float32Array.from(biases), tokens.length);
  }

  setGrammar(grammar) {
    call('thimble_session_set_grammar', pointerOf(this), grammar ? pointerOf(grammar) : null);
  }

  memory() {
    return filled('thimble_memory', 'thimble_session_memory', pointerOf(this));
  }

  options() {
    const { progress, progressUser, heads, draftModel, ...options } = filled('thimble_session_options', 'thimble_session_get_options', pointerOf(this));
    for (const field of Object.keys(words)) options[camel(field)] = word(field, options[camel(field)]);
    return options;
  }

  stats() {
    return filled('thimble_stats', 'thimble_session_stats', pointerOf(this));
  }

  async save(path, note = '') {
    const data = buffer(note);
    await this.#run(undefined, 'thimble_session_save', path, data, data.length);
  }

  async restore(path) {
    await this.#run(undefined, 'thimble_session_restore', path);
  }

  async shrink(pool) {
    const freed = [0];
    await this.#run(undefined, 'thimble_session_shrink', pool, freed);
    return freed[0];
  }

  async close() {
    const turn = this.#turn;
    if (!owners.get(this).closed) {
      this.#turn = turn.then(() => close(this));
    }
    await this.#turn;
  }
}

export function devices() {
  const count = [0];
  call('thimble_device_count', count);
  return Array.from({ length: count[0] }, (_, index) => filled('thimble_device_info', 'thimble_device_get', index));
}

export const sessionFileInfo = (path) =>
  JSON.parse(textOf((text, capacity, length) => call('thimble_session_file_info', path, text, capacity, length)));

export const sessionFileNote = (path) =>
  bytes((note, capacity, length) => call('thimble_session_file_note', path, note, capacity, length));

// `await using session = ...` and `using model = ...`, where the language has them.
if (Symbol.asyncDispose) Session.prototype[Symbol.asyncDispose] = Session.prototype.close;
if (Symbol.dispose) for (const handle of [Model, Heads]) handle.prototype[Symbol.dispose] = handle.prototype.close;
