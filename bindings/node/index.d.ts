/** Calls that fail throw this, or reject with it. */
export class ThimbleError extends Error {
  /** A number of thimble.h, 30. */
  code: number;
  /** Its name, "BUDGET". */
  status: string;
  /** Of BUDGET: what the budget lacks, else 0. */
  bytesMissing: number;
}

/** thimble_session_options; what is left out is the header's default. */
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
}

/** thimble_sampler_options; so made, the most likely token is taken. */
export interface SamplerOptions {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repeatPenalty?: number;
  repeatLast?: number;
  seed?: number | bigint;
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
}

export interface Device {
  /** What SessionOptions.device takes. */
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
  /** So many of the messages the session holds already. */
  held?: number;
  format?: string;
  /** A template in Jinja to run instead of the model's. */
  template?: string;
  /** What the template reads besides. */
  variables?: Record<string, unknown>;
}

/** What aborts the signal interrupts the call, which then rejects with the signal's reason; the session stays of use. */
export interface Abortable {
  signal?: AbortSignal;
}

/** A model in a GGUF file. Closed, it stays in memory until its sessions and heads are closed, too. */
export class Model {
  constructor(path: string);
  /** What the library had to say about the file, a sentence each. */
  readonly warnings: string[];
  info(): ModelInfo;
  /** `bos` puts BOS in front where the model asks for one; `special` reads the text of control tokens as them. */
  tokenize(text: string | Uint8Array, options?: { bos?: boolean; special?: boolean }): Int32Array;
  detokenize(tokens: ArrayLike<number>, options?: { special?: boolean }): string;
  /** Whether this token ends an answer. */
  tokenEnds(token: number): boolean;
  /** Messages as the model was taught to read them: tokenise it with `special`. */
  chat(messages: Message[], options?: ChatOptions): string;
  /** Opens a trained retainer of this model. */
  heads(path: string): Heads;
  /** What a session with these options would take. */
  plan(options?: SessionOptions): Memory;
  /** The largest pool that fits options.budgetBytes. */
  largestPool(options?: SessionOptions): number;
  /** Makes a session; all memory that it will ever need is allocated here. */
  session(options?: SessionOptions): Promise<Session>;
  close(): void;
}

/** A trained retainer of a model: Model.heads() opens it. */
export class Heads {
  private constructor();
  readonly model: Model;
  /** The retention that they serve. */
  readonly retention: 'locret' | 'keydiff' | 'mix' | 'adore';
  close(): void;
}

/**
 * A reading: Model.session() makes one. Calls that return promises run on a worker thread, one after the other; the others throw
 * BUSY while one runs, interrupt() excepted.
 */
export class Session {
  private constructor();
  readonly model: Model;
  /** Append tokens to the prompt and read what is surely complete. After INTERRUPTED the same call goes on. */
  feed(tokens: ArrayLike<number>, options?: Abortable): Promise<void>;
  /** End the prompt: read all that waits. */
  flush(options?: Abortable): Promise<void>;
  /** Sample the next token, append it, and give it. */
  step(options?: Abortable): Promise<number>;
  /** The same with a token that the caller chose. */
  accept(token: number, options?: Abortable): Promise<void>;
  /** The text of the next token of an answer; bytes of an unfinished code point are held back until it is whole. */
  text(token: number): string;
  /** The answer, piece by piece, until a token ends it or `limit` tokens are made. */
  generate(options?: Abortable & { limit?: number }): AsyncGenerator<string, void, void>;
  /** The logits of the next token, one for each token of the vocabulary. */
  logits(): Promise<Float32Array>;
  /** Append these tokens; the natural logarithm of each one's probability after all before it. */
  score(tokens: ArrayLike<number>, options?: Abortable): Promise<Float32Array>;
  /** Forget everything from this position on. */
  rewind(position: number): void;
  reset(): void;
  /** A session that goes on from the same state, within the same budget. */
  clone(): Promise<Session>;
  /** Stop the running call, or else the next one, with INTERRUPTED. */
  interrupt(): void;
  /** The original positions that a KV head still holds, ascending. */
  kept(layer: number, kvHead: number): Int32Array;
  /** By position: the share of heads that hold it, and the last token's attention to it, which needs SessionOptions.watch. */
  keptByPosition(options?: { attended?: boolean }): { kept: Float32Array; attended: Float32Array };
  setSampler(sampler: SamplerOptions): void;
  memory(): Memory;
  stats(): Stats;
  /** Write all that the session holds to a file, and `note` with it. */
  save(path: string, note?: string | Uint8Array): Promise<void>;
  /** Take the state of a saved session that was made with the same settings. */
  restore(path: string): Promise<void>;
  /** Evict down to `pool` entries a head; gives the bytes that were freed. */
  shrink(pool: number): Promise<number>;
  /** Gives its memory back when the calls before are over. */
  close(): Promise<void>;
}

export function version(): string;
export function buildInfo(): string;
export function devices(): Device[];
/** What the file of a saved session says of itself. */
export function sessionFileInfo(path: string): Record<string, unknown>;
/** The bytes that were given to Session.save(). */
export function sessionFileNote(path: string): Uint8Array;
