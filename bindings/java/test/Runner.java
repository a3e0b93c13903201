package thimble;

import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Runs the steps of the conformance script. */
final class Runner {
  private final Path root;
  private final Path file;
  private final Map<String, Session> sessions = new HashMap<>();
  private Model model;
  private Heads heads;
  private ModelInfo info;

  Runner(Path root, Path file) {
    this.root = root;
    this.file = file;
  }

  Object run(Map<String, Object> step) throws Exception {
    try {
      return result(new Step(step));
    } catch (ThimbleException error) {
      return Map.of("error", error.name());
    }
  }

  /** A step's arguments. */
  private record Step(Map<String, Object> fields) {
    String text(String name) {
      return (String) fields.get(name);
    }

    long whole(String name) {
      return (Long) fields.get(name);
    }

    int integer(String name) {
      return (int) whole(name);
    }

    boolean flag(String name) {
      return Boolean.TRUE.equals(fields.get(name));
    }

    int[] ids() {
      return ((List<?>) fields.get("ids")).stream().mapToInt(id -> (int) (long) (Long) id).toArray();
    }

    Map<String, Object> options() {
      return BindingTest.object(fields.get("options"));
    }
  }

  private Object result(Step step) throws Exception {
    switch (step.text("do")) {
      case "open":
        model = Model.open(root.resolve(step.text("model")));
        heads = model.heads(root.resolve(step.text("heads")));
        return Map.of("warnings", (long) model.warnings().size());
      case "info":
        info = model.info();
        return pick(info, "layers", "kv_heads", "vocab", "context_length", "eos", "parameters", "architecture", "quantization",
            "chat_format", "window_layers");
      case "tokenize": return Map.of("ids", list(model.tokenize(step.text("text"), flags(step))));
      case "detokenize":
        return Map.of("text", model.detokenize(step.ids(), step.flag("special") ? Thimble.DETOKENIZE_SPECIAL : 0));
      case "ends": return Map.of("ends", model.tokenEnds(step.integer("token")));
      case "chat": {
        Chat chat = new Chat();
        for (Object message : (List<?>) step.fields().get("messages")) {
          Step fields = new Step(BindingTest.object(message));
          chat.add(fields.text("role"), fields.text("content"));
        }
        return Map.of("text", model.chat(chat));
      }
      case "plan": {
        Memory memory = model.plan(options(step.options()));
        Map<String, Object> result = pick(memory, "pool", "capacity", "chunk", "budget", "dense_bytes_per_token");
        result.put("fits", memory.total <= memory.budget);
        return result;
      }
      case "refused": return refused(step.options());
      case "largest_pool": {
        long pool = model.largestPool(options(step.options()));
        return Map.of("fits", fits(step.options(), "pool", pool), "one_more_does_not", !fits(step.options(), "pool", pool + 1));
      }
      case "create":
        sessions.put(step.text("session"), model.session(options(step.options())));
        return position(sessions.get(step.text("session")));
      case "saved": {
        Step saved = new Step(BindingTest.object(Json.parse(Thimble.sessionFileInfo(file))));
        String note = new String(Thimble.sessionFileNote(file), StandardCharsets.UTF_8);
        return Map.of("position", saved.whole("position"), "note", note);
      }
      case "close_model":
        model.close();
        heads.close();
        return Map.of("closed", true);
      default: return ofSession(sessions.get(step.text("session")), step);
    }
  }

  private Object ofSession(Session session, Step step) throws Exception {
    switch (step.text("do")) {
      case "read": return read(session, step);
      case "step": return steps(session, step.integer("count"));
      case "accept": session.accept(step.integer("token")); return position(session);
      case "flush": session.flush(); return position(session);
      case "reset": session.reset(); return position(session);
      case "rewind": session.rewind(step.whole("position")); return position(session);
      case "restore": session.restore(file); return position(session);
      case "interrupt": session.interrupt(); return Map.of("asked", true);
      case "score": {
        List<Object> logprobs = new ArrayList<>();
        for (float logprob : session.score(step.ids())) logprobs.add((double) logprob);
        return Map.of("logprobs", logprobs);
      }
      case "logits": {
        float[] logits = session.logits();
        int best = 0;
        for (int i = 0; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
        return Map.of("count", (long) logits.length, "best", (long) best);
      }
      case "sample": {
        Sampler sampler = new Sampler();
        sampler.temperature = ((Number) step.fields().get("temperature")).floatValue();
        sampler.topK = step.integer("top_k");
        sampler.seed = step.whole("seed");
        session.setSampler(sampler);
        return Map.of("set", true);
      }
      case "grammar": {
        if (step.text("kind").equals("none")) {
          session.setGrammar(null);
        } else {
          try (Grammar grammar = model.grammar(Grammar.Kind.valueOf(step.text("kind").toUpperCase()), step.text("text"))) {
            session.setGrammar(grammar);
          }
        }
        return Map.of("set", true);
      }
      case "clone":
        sessions.put(step.text("as"), session.cloned());
        return position(sessions.get(step.text("as")));
      case "save":
        session.save(file, step.text("note").getBytes(StandardCharsets.UTF_8));
        return Map.of("saved", true);
      case "kept": {
        int[] kept = session.kept(step.integer("layer"), step.integer("kv_head"));
        return step.flag("only_count") ? Map.of("count", (long) kept.length) : Map.of("positions", list(kept));
      }
      case "stored_by_position": {
        float[] stored = session.storedByPosition();
        return Map.of("count", (long) stored.length, "entries", Math.round(sum(stored) * info.layers * info.kvHeads));
      }
      case "kept_by_position": {
        float[] kept = session.keptByPosition();
        double entries = sum(kept) * info.layers * info.kvHeads;
        return Map.of("count", (long) kept.length, "entries", Math.round(entries), "attention_in_thousandths",
            Math.round(sum(session.attendedByPosition()) * 1000));
      }
      case "stats":
        return pick(session.stats(), "position", "waiting", "entries", "evictions", "generated", "prefill_tokens");
      case "memory": {
        Memory memory = session.memory();
        Map<String, Object> result = pick(memory, "pool", "capacity");
        result.put("holds_some", memory.allocated > 0);
        result.put("within_the_budget", memory.allocated <= memory.budget);
        return result;
      }
      case "decided": return pick(session.options(), "pool", "chunk", "stabilizers", "local", "protect_init", "max_new", "select_prefill");
      case "shrink": return Map.of("freed_some", session.shrink(step.integer("pool")) > 0);
      case "close":
        sessions.remove(step.text("session")).close();
        return Map.of("closed", true);
      default: throw new IllegalArgumentException("no such step: " + step);
    }
  }

  private Object refused(Map<String, Object> given) throws Exception {
    try (Session session = model.session(options(given))) {
      return Map.of("position", session.stats().position);
    } catch (ThimbleException error) {
      long enough = (Long) given.get("budget_bytes") + error.bytesMissing;
      return Map.of("code", (long) error.code, "name", error.name(), "says_why", !error.getMessage().isEmpty(),
          "bytes_missing_is_enough", fits(given, "budget_bytes", enough), "a_byte_less_is_not",
          !fits(given, "budget_bytes", enough - 1));
    }
  }

  private boolean fits(Map<String, Object> given, String option, long value) throws Exception {
    Map<String, Object> changed = new HashMap<>(given);
    changed.put(option, value);
    try {
      model.plan(options(changed));
      return true;
    } catch (ThimbleException error) {
      return false;
    }
  }

  private Options options(Map<String, Object> given) throws Exception {
    Options options = new Options();
    options.device = "cpu";
    for (Map.Entry<String, Object> option : given.entrySet()) {
      Field field = Options.class.getField(camel(option.getKey()));
      Object value = option.getValue();
      if (option.getKey().equals("heads")) {
        options.heads = heads;
      } else if (option.getKey().equals("draft_model")) {
        options.draftModel = model;
      } else if (value instanceof String name) {
        String constant = option.getKey().toUpperCase() + "_" + name.toUpperCase();
        field.setInt(options, Thimble.class.getField(constant).getInt(null));
      } else if (field.getType() == long.class) {
        field.setLong(options, (Long) value);
      } else {
        field.setInt(options, (int) (long) (Long) value);
      }
    }
    return options;
  }

  private Object read(Session session, Step step) throws IOException {
    byte[] text = step.text("text") != null ? step.text("text").getBytes(StandardCharsets.UTF_8)
        : Arrays.copyOf(Files.readAllBytes(root.resolve(step.text("file"))), step.integer("bytes"));
    int[] ids = model.tokenize(text, flags(step));
    int piece = step.fields().containsKey("piece") ? step.integer("piece") : ids.length;
    for (int at = 0; at < ids.length; at += piece) session.feed(Arrays.copyOfRange(ids, at, Math.min(at + piece, ids.length)));
    return position(session);
  }

  private static Object steps(Session session, int count) {
    int[] tokens = new int[count];
    StringBuilder text = new StringBuilder();
    for (int i = 0; i < count; i++) text.append(session.text(tokens[i] = session.step()));
    return Map.of("tokens", list(tokens), "text", text.toString());
  }

  private static Object position(Session session) {
    return Map.of("position", session.stats().position);
  }

  private static int flags(Step step) {
    return (step.flag("bos") ? Thimble.TOKENIZE_ADD_BOS : 0) | (step.flag("special") ? Thimble.TOKENIZE_PARSE_SPECIAL : 0);
  }

  private static List<Object> list(int[] numbers) {
    List<Object> list = new ArrayList<>();
    for (int number : numbers) list.add((long) number);
    return list;
  }

  private static double sum(float[] shares) {
    double sum = 0;
    for (float share : shares) sum += share;
    return sum;
  }

  private static String camel(String name) {
    StringBuilder out = new StringBuilder();
    for (String word : name.split("_")) out.append(out.isEmpty() ? word : word.substring(0, 1).toUpperCase() + word.substring(1));
    return out.toString();
  }

  private static Map<String, Object> pick(Object value, String... names) throws Exception {
    Map<String, Object> picked = new LinkedHashMap<>();
    for (String name : names) {
      Object field = value.getClass().getField(camel(name)).get(value);
      picked.put(name, field instanceof Integer number ? (Object) (long) number : field);
    }
    return picked;
  }
}
