package thimble;

import java.nio.file.Path;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Objects;
import java.util.function.LongFunction;

/**
 * One sequence of tokens and its memory. {@link Model#session} creates it. Calls from several threads wait for each other;
 * {@link #interrupt} does not.
 */
public final class Session extends Handle {
  private final Model model;
  private final Object turn = new Object(); // held during calls; taken before Handle's own monitor

  Session(Model model, long pointer) {
    super(pointer, Native::sessionFree, model);
    this.model = model;
  }

  @Override
  <T> T call(LongFunction<T> call) {
    synchronized (turn) {
      return super.call(call);
    }
  }

  private interface Action {
    void run(long session);
  }

  private void run(Action action) {
    call(session -> {
      action.run(session);
      return null;
    });
  }

  public Model model() {
    return model;
  }

  /** Append tokens to the prompt and read every chunk that is complete. After INTERRUPTED repeat the call to continue. */
  public void feed(int[] tokens) {
    Objects.requireNonNull(tokens);
    run(session -> Native.feed(session, tokens));
  }

  /** End the prompt: read all waiting tokens. */
  public void flush() {
    run(Native::flush);
  }

  /** Sample the next token, append it and return it. {@link Model#tokenEnds} tells whether it ends the answer. */
  public int step() {
    return call(Native::step);
  }

  /** Like step, with a token that the caller chose. */
  public void accept(int token) {
    run(session -> Native.accept(session, token));
  }

  /** The text of the next token of an answer; bytes of an incomplete code point are held back until it is complete. */
  public String text(int token) {
    return Thimble.text(call(session -> Native.text(session, token)));
  }

  /** The answer, piece by piece, until a token ends it or {@code limit} tokens were generated. Can be iterated once. */
  public Iterable<String> generate(int limit) {
    return () -> new Answer(limit);
  }

  /** The logits of the next token, one for each token of the vocabulary. */
  public float[] logits() {
    return call(Native::logits);
  }

  /** Append these tokens; return the natural logarithm of each one's probability given all before it. */
  public float[] score(int[] tokens) {
    float[] logprobs = new float[tokens.length];
    run(session -> Native.score(session, tokens, logprobs));
    return logprobs;
  }

  /** Forget every token from this position on; CANNOT_REWIND if entries were evicted since. */
  public void rewind(long position) {
    run(session -> Native.rewind(session, position));
  }

  /** Return to the state after creation. */
  public void reset() {
    run(Native::reset);
  }

  /** Create a second session with the same state, within the same budget. */
  public Session cloned() {
    return call(session -> new Session(model, Native.sessionClone(session)));
  }

  /** Stop the running call, or if there is none the next one, with INTERRUPTED. From any thread. */
  public void interrupt() {
    super.call(session -> {
      Native.interrupt(session);
      return null;
    });
  }

  /** The original positions that a KV head still holds, ascending. */
  public int[] kept(int layer, int kvHead) {
    return call(session -> Native.kept(session, layer, kvHead));
  }

  /** For each position: the share of heads that still hold it. */
  public float[] keptByPosition() {
    return call(Native::keptByPosition);
  }

  /** For each position: the attention that the last token paid to it. Needs {@link Options#watch}. */
  public float[] attendedByPosition() {
    return call(Native::attendedByPosition);
  }

  /** For each position: the share of heads that have it in the store of evicted entries and not in the pool. */
  public float[] storedByPosition() {
    return call(Native::storedByPosition);
  }

  public void setSampler(Sampler sampler) {
    Objects.requireNonNull(sampler);
    run(session -> Native.setSampler(session, sampler));
  }

  /** Adds a number to the logits of these tokens before one is sampled, until the next call. */
  public void setBias(int[] tokens, float[] biases) {
    if (tokens.length != biases.length) throw new IllegalArgumentException("each token needs a bias");
    run(session -> Native.setBias(session, tokens, biases));
  }

  /** From now on, the generated tokens form a text of the grammar, which begins with the next one. Null: any token may come. */
  public void setGrammar(Grammar grammar) {
    if (grammar == null) {
      run(session -> Native.setGrammar(session, 0));
    } else {
      grammar.call(pointer -> {
        run(session -> Native.setGrammar(session, pointer));
        return null;
      });
    }
  }

  /** The memory of the session. */
  public Memory memory() {
    Memory memory = new Memory();
    run(session -> Native.memory(session, memory));
    return memory;
  }

  /** The options of the session with every default decided, without heads. */
  public Options options() {
    Options options = new Options();
    options.device = Thimble.text(call(session -> Native.options(session, options)));
    return options;
  }

  public Stats stats() {
    Stats stats = new Stats();
    run(session -> Native.stats(session, stats));
    return stats;
  }

  /** Save the session to a file, together with {@code note}. */
  public void save(Path path, byte[] note) {
    run(session -> Native.save(session, Thimble.terminated(path.toString()), note));
  }

  /** Replace the state by that of a saved session with the same settings. */
  public void restore(Path path) {
    run(session -> Native.restore(session, Thimble.terminated(path.toString())));
  }

  /** Evict down to {@code pool} entries per head; returns the bytes that were freed. */
  public long shrink(int pool) {
    return call(session -> Native.shrink(session, pool));
  }

  /** Frees its memory; waits for a running call. */
  @Override
  public void close() {
    synchronized (turn) {
      super.close();
    }
  }

  private final class Answer implements Iterator<String> {
    private int left;
    private String next = "";

    Answer(int limit) {
      left = limit;
    }

    @Override
    public boolean hasNext() {
      while (next.isEmpty() && left > 0) {
        int token = step();
        boolean over = Native.tokenEnds(model.held(), token);
        left = over ? 0 : left - 1;
        if (!over) next = text(token);
      }
      return !next.isEmpty();
    }

    @Override
    public String next() {
      if (!hasNext()) throw new NoSuchElementException("the answer is over");
      String piece = next;
      next = "";
      return piece;
    }
  }
}
