package thimble;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.function.LongFunction;

/** A model in a GGUF file. Any number of threads and sessions may use one. */
public final class Model extends Handle {
  private final List<String> warnings;

  private Model(long pointer, List<String> warnings) {
    super(pointer, Native::modelFree, null);
    this.warnings = warnings;
  }

  /** Opens a model; the file must not change while the model exists. */
  public static Model open(Path path) {
    List<String> warnings = new ArrayList<>();
    return new Model(Native.modelOpen(Thimble.terminated(path.toString()), warnings), warnings);
  }

  /** The library's warnings about the file, one sentence each. */
  public List<String> warnings() {
    return warnings;
  }

  public ModelInfo info() {
    return call(model -> {
      ModelInfo info = new ModelInfo();
      Native.modelInfo(model, info);
      return info;
    });
  }

  /** Text to token ids. Flags: {@link Thimble#TOKENIZE_ADD_BOS}, {@link Thimble#TOKENIZE_PARSE_SPECIAL}. */
  public int[] tokenize(String text, int flags) {
    return tokenize(Thimble.bytes(text), flags);
  }

  /** The same for the bytes of a text. */
  public int[] tokenize(byte[] text, int flags) {
    return call(model -> Native.tokenize(model, text, flags));
  }

  /** Token ids to text. Flags: {@link Thimble#DETOKENIZE_SPECIAL}. */
  public String detokenize(int[] ids, int flags) {
    Objects.requireNonNull(ids);
    return Thimble.text(call(model -> Native.detokenize(model, ids, flags)));
  }

  /** Whether this token ends an answer. */
  public boolean tokenEnds(int token) {
    return call(model -> Native.tokenEnds(model, token));
  }

  /** Messages formatted as the model was trained to read them; tokenize the text with {@link Thimble#TOKENIZE_PARSE_SPECIAL}. */
  public String chat(Chat chat) {
    int flags = chat.assistant ? Thimble.CHAT_ADD_ASSISTANT : 0;
    return Thimble.text(call(model -> Native.chat(model, Thimble.bytes(chat.json()), flags, chat.held,
        Thimble.terminated(chat.format), Thimble.bytes(chat.template), Thimble.bytes(chat.variables))));
  }

  /** Opens the heads, a trained retainer of this model. */
  public Heads heads(Path path) {
    return call(model -> new Heads(this, Native.headsOpen(model, Thimble.terminated(path.toString()))));
  }

  /** What an answer may be. */
  public Grammar grammar(Grammar.Kind kind, String text) {
    return call(model -> new Grammar(Native.grammarCreate(model, kind.ordinal(), Thimble.bytes(text))));
  }

  /** The memory of a session with these options. */
  public Memory plan(Options options) {
    Memory memory = new Memory();
    return with(options, (model, device, heads, drafter) -> {
      Native.plan(model, options, device, heads, drafter, memory);
      return memory;
    });
  }

  /** The largest pool that fits the options' budget. */
  public int largestPool(Options options) {
    return with(options, (model, device, heads, drafter) -> Native.largestPool(model, options, device, heads, drafter));
  }

  /** Creates a session; all memory that it will ever need is allocated here. */
  public Session session(Options options) {
    return with(options,
        (model, device, heads, drafter) -> new Session(this, Native.sessionCreate(model, options, device, heads, drafter)));
  }

  private interface OfOptions<T> {
    T call(long model, byte[] device, long heads, long drafter);
  }

  /** Makes a call with the objects that options point to. */
  private <T> T with(Options options, OfOptions<T> call) {
    byte[] device = Thimble.terminated(options.device);
    Heads heads = options.heads;
    if (heads != null && heads.model != this) throw new IllegalArgumentException("these heads were opened for another model");
    return call(model -> lend(heads,
        retainer -> lend(options.draftModel, drafter -> call.call(model, device, retainer, drafter))));
  }

  /** Calls with the pointer of a handle, or with 0 for null. */
  private static <T> T lend(Handle handle, LongFunction<T> call) {
    return handle == null ? call.apply(0) : handle.call(call);
  }
}
