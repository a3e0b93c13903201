/** Calls that fail throw this, or reject with it. */
export class ThimbleError extends Error {
  /** The code in thimble.h, such as 30. */
  code: number;
  /** Its name, "BUDGET". */
  status: string;
  /** For BUDGET: the bytes that the budget lacks, otherwise 0. */
  bytesMissing: number;
}

/** thimble_session_options; omitted fields have the header's defaults. */
export interface SessionOptions {
  budgetBytes?: number;
  retention?: 'none' | 'window' | 'random' | 'locret' | 'keydiff' | 'tova' | 'reread' | 'adore' | 'mix';
  pool?: number;
  heads?: Heads;
  device?: string;
  threads?: number;
  retainScope?: 'per_head' | 'layer';
  chunk?: number;
  stabilizers?: number;
  local?: number;
  protectInit?: number;
  maxNew?: number;
  selection?: 'dense' | 'tokenselect' | 'quest';
  selectK?: number;
  selectInit?: number;
  selectLocal?: number;
  selectTheta?: number;
  vote?: 'auto' | 'layer' | 'group';
  voteScale?: 'none' | 'sqrt';
  voteWindow?: number;
  selectPrefill?: number;
  positions?: 'list' | 'original';
  context?: number;
  seed?: number;
  selectPage?: number;
  denseLayers?: number;
  watch?: number;
  rebuild?: number;
  rebuildEvery?: number;
  draft?: 'none' | 'lookup' | 'model' | 'mtp';
  /** For 'model'. */
  draftModel?: Model;
  draftTokens?: number;
  recallFormat?: 'f16' | 'q8_0' | 'q4_0';
  recallMemBytes?: number;
  recall?: number | 'all';
  recallEvery?: number;
  recallPrefill?: number;
  recallDiskBytes?: number;
  keyFormat?: 'f16' | 'q8_0' | 'q4_0';
  valueFormat?: 'f16' | 'q8_0' | 'q4_0';
}

/** thimble_sampler_options; by default the most likely token is taken. */
export interface SamplerOptions {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repeatPenalty?: number;
  repeatLast?: number;
  seed?: number | bigint;
  presencePenalty?: number;
  frequencyPenalty?: number;
}

/** thimble_model_info. */
export interface ModelInfo {
  hasWeights: number;
  hasTokenizer: number;
  layers: number;
  dModel: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  dFf: number;
  vocab: number;
  contextLength: number;
  bos: number;
  eos: number;
  files: number;
  parameters: number;
  fileBytes: number;
  kvBytesPerToken: number;
  architecture: string;
  name: string;
  quantization: string;
  chatFormat: string;
  chatProblem: string;
  experts: number;
  expertsPerToken: number;
  window: number;
  windowLayers: number;
}

/** thimble_memory. */
export interface Memory {
  pool: number;
  capacity: number;
  chunk: number;
  budget: number;
  weights: number;
  shared: number;
  poolBytes: number;
  view: number;
  workspace: number;
  io: number;
  fixed: number;
  total: number;
  allocated: number;
  denseBytesPerToken: number;
  mapped: number;
  mappedResident: number;
  hostTables: number;
  largestPosition: number;
  selectionPays: number;
  states: number;
  stateSlots: number;
  draft: number;
  streamed: number;
  store: number;
  storeFile: number;
  finerLayers: number;
  recallBytes: number;
}

/** thimble_stats. */
export interface Stats {
  entries: number;
  position: number;
  waiting: number;
  evicted: number;
  evictions: number;
  generated: number;
  selected: number;
  cacheHits: number;
  cacheMisses: number;
  prefillTokens: number;
  prefillSeconds: number;
  decodeSeconds: number;
  prefillBytes: number;
  prefillFlop: number;
  decodeBytes: number;
  decodeFlop: number;
  saturated: number;
  stored: number;
  recalled: number;
}

export interface Device {
  /** The value for SessionOptions.device. */
  name: string;
  description: string;
  totalBytes: number;
  freeBytes: number;
}

export interface Message {
  role: string;
  content: string;
  [other: string]: unknown;
}

export interface ChatOptions {
  /** End where the answer begins; default true. */
  assistant?: boolean;
  /** The number of leading messages that the session already holds. */
  held?: number;
  format?: string;
  /** A Jinja template to run instead of the model's. */
  template?: string;
  /** Further variables for the template. */
  variables?: Record<string, unknown>;
}

/** Aborting the signal interrupts the call, which then rejects with the signal's reason; the session stays usable. */
export interface Abortable {
  signal?: AbortSignal;
}

/** A model in a GGUF file. A closed model stays in memory until its sessions and heads are closed too. */
export class Model {
  constructor(path: string);
  /** The library's warnings about the file, one sentence each. */
  readonly warnings: string[];
  info(): ModelInfo;
  /** `bos` puts BOS first if the model asks for it; `special` turns text that spells a control token into that token. */
  tokenize(text: string | Uint8Array, options?: { bos?: boolean; special?: boolean }): Int32Array;
  detokenize(tokens: ArrayLike<number>, options?: { special?: boolean }): string;
  /** Whether this token ends an answer. */
  tokenEnds(token: number): boolean;
  /** Messages formatted as the model was trained to read them; tokenize the text with `special`. */
  chat(messages: Message[], options?: ChatOptions): string;
  /** Opens a trained retainer of this model. */
  heads(path: string): Heads;
  /** What an answer may be: a JSON schema (an object or its text), a regular expression, or a grammar in llama.cpp's notation. */
  grammar(kind: 'json_schema' | 'regex' | 'gbnf', text: string | object): Grammar;
  /** The memory of a session with these options. */
  plan(options?: SessionOptions): Memory;
  /** The largest pool that fits options.budgetBytes. */
  largestPool(options?: SessionOptions): number;
  /** Creates a session; all memory that it will ever need is allocated here. */
  session(options?: SessionOptions): Promise<Session>;
  close(): void;
}

/** The texts that a model may generate: Model.grammar() makes one. */
export class Grammar {
  private constructor();
  close(): void;
}

/** A trained retainer of a model: Model.heads() opens it. */
export class Heads {
  private constructor();
  readonly model: Model;
  /** The retention that the heads serve. */
  readonly retention: 'locret' | 'keydiff' | 'mix' | 'adore';
  close(): void;
}

/**
 * One sequence of tokens and its memory. Model.session() creates it. Calls that return promises run on a worker thread, one
 * after the other; the other calls, except interrupt(), throw BUSY while one runs.
 */
export class Session {
  private constructor();
  readonly model: Model;
  /** Append tokens to the prompt and read every chunk that is complete. After INTERRUPTED repeat the call to continue. */
  feed(tokens: ArrayLike<number>, options?: Abortable): Promise<void>;
  /** End the prompt: read all waiting tokens. */
  flush(options?: Abortable): Promise<void>;
  /** Sample the next token, append it and return it. */
  step(options?: Abortable): Promise<number>;
  /** Like step, with a token that the caller chose. */
  accept(token: number, options?: Abortable): Promise<void>;
  /** The text of the next token of an answer; bytes of an incomplete code point are held back until it is complete. */
  text(token: number): string;
  /** The answer, piece by piece, until a token ends it or `limit` tokens were generated. */
  generate(options?: Abortable & { limit?: number }): AsyncGenerator<string, void, void>;
  /** The logits of the next token, one for each token of the vocabulary. */
  logits(): Promise<Float32Array>;
  /** Append these tokens; return the natural logarithm of each one's probability given all before it. */
  score(tokens: ArrayLike<number>, options?: Abortable): Promise<Float32Array>;
  /** Forget every token from this position on. */
  rewind(position: number): void;
  reset(): void;
  /** Create a second session with the same state, within the same budget. */
  clone(): Promise<Session>;
  /** Stop the running call, or if there is none the next one, with INTERRUPTED. */
  interrupt(): void;
  /** The original positions that a KV head still holds, ascending. */
  kept(layer: number, kvHead: number): Int32Array;
  /** For each position: the share of heads that hold it, and the last token's attention to it (needs SessionOptions.watch). */
  keptByPosition(options?: { attended?: boolean }): { kept: Float32Array; attended: Float32Array };
  /** For each position: the share of heads that have it in the store of evicted entries and not in the pool. */
  storedByPosition(): Float32Array;
  setSampler(sampler: SamplerOptions): void;
  /** Adds a number to the logits of these tokens before one is sampled, until the next call. */
  setBias(tokens: ArrayLike<number>, biases: ArrayLike<number>): void;
  /** From now on, the generated tokens form a text of the grammar, which begins with the next one. null: any token may come. */
  setGrammar(grammar: Grammar | null): void;
  memory(): Memory;
  /** The options of the session with every default decided, without heads. */
  options(): Required<Omit<SessionOptions, 'heads'>>;
  stats(): Stats;
  /** Save the session to a file, together with `note`. */
  save(path: string, note?: string | Uint8Array): Promise<void>;
  /** Replace the state by that of a saved session with the same settings. */
  restore(path: string): Promise<void>;
  /** Evict down to `pool` entries per head; returns the bytes that were freed. */
  shrink(pool: number): Promise<number>;
  /** Frees its memory after all earlier calls have ended. */
  close(): Promise<void>;
}

export function version(): string;
export function buildInfo(): string;
export function devices(): Device[];
/** A description of a saved session's file. */
export function sessionFileInfo(path: string): Record<string, unknown>;
/** The note that was passed to Session.save(). */
export function sessionFileNote(path: string): Uint8Array;
