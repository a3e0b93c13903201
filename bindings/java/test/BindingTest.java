package thimble;

import java.io.IOException;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;

/**
 * The Java binding's tests: layouts, the conformance script, threads. $THIMBLE_LAYOUTS is what layouts.py wrote, $THIMBLE_ROOT the
 * project's folder.
 */
public final class BindingTest {
  private static final Path ROOT = Path.of(System.getenv("THIMBLE_ROOT"));
  private static int passed;
  private static int failed;

  private interface Test {
    void run() throws Exception;
  }

  private static void test(String name, Test test) {
    try {
      test.run();
      passed++;
    } catch (Exception | AssertionError problem) {
      failed++;
      System.out.println(name + " failed");
      problem.printStackTrace(System.out);
    }
  }

  static void expect(boolean holds, String otherwise) {
    if (!holds) throw new AssertionError(otherwise);
  }

  private static void equal(Object given, Object expected) {
    expect(expected.equals(given), "gave     " + given + "\nexpected " + expected);
  }

  public static void main(String[] arguments) {
    test("the fields of structs are the header's", BindingTest::fieldsAreTheHeaders);
    test("constants are the header's", BindingTest::constantsAreTheHeaders);
    test("all functions of the header are called", BindingTest::functionsAreAllCalled);
    test("every step of the conformance script gives what it says", BindingTest::conformance);
    test("another thread stops a reading, and the same call goes on", BindingTest::interrupt);
    test("a session holds its model, and says when it is closed", BindingTest::lifetimes);
    test("errors say what is wrong", BindingTest::errors);
    System.out.println(passed + " passed, " + failed + " failed");
    System.exit(failed == 0 ? 0 : 1);
  }

  // ---- layouts: the C compiler checked sizes in thimblejni.c, so names and kinds are left ----

  private static final Map<String, Class<?>> MIRRORS = Map.of("thimble_device_info", Device.class, "thimble_model_info",
      ModelInfo.class, "thimble_memory", Memory.class, "thimble_stats", Stats.class, "thimble_session_options", Options.class,
      "thimble_sampler_options", Sampler.class);
  // Fields that the Java object does not have, or has in another form.
  private static final Set<String> OTHERS = Set.of("struct_size", "reserved", "progress", "progress_user", "device", "heads",
      "draft_model");

  // Policies are constants here, so their names are not needed.
  private static final Set<String> UNCALLED = Set.of("thimble_retention_name", "thimble_selection_name");

  private static String camel(String name) {
    StringBuilder out = new StringBuilder();
    for (String word : name.split("_")) out.append(out.isEmpty() ? word : word.substring(0, 1).toUpperCase() + word.substring(1));
    return out.toString();
  }

  private static Map<String, Object> layouts() throws IOException {
    return object(Json.parse(Files.readString(Path.of(System.getenv("THIMBLE_LAYOUTS")))));
  }

  @SuppressWarnings("unchecked")
  static Map<String, Object> object(Object json) {
    return (Map<String, Object>) json;
  }

  private static void fieldsAreTheHeaders() throws Exception {
    Set<String> header = new TreeSet<>();
    for (Map.Entry<String, Object> struct : object(layouts().get("structs")).entrySet()) {
      if (!MIRRORS.containsKey(struct.getKey())) continue; // only thimblejni.c uses it, directly from the header
      boolean options = struct.getKey().equals("thimble_session_options");
      for (String field : object(object(struct.getValue()).get("fields")).keySet())
        if (!OTHERS.contains(field) || (!options && field.equals("heads"))) header.add(struct.getKey() + "." + field);
    }
    Set<String> copied = new TreeSet<>();
    for (String row : Thimble.text(Native.rows()).strip().split("\n")) {
      String field = row.substring(0, row.indexOf(' '));
      copied.add(field);
      int dot = field.indexOf('.');
      Class<?> type = MIRRORS.get(field.substring(0, dot)).getField(camel(field.substring(dot + 1))).getType();
      Class<?> kind = Map.<String, Class<?>>of("I", int.class, "J", long.class, "F", float.class, "D", double.class, "S",
          String.class).get(row.substring(row.indexOf(' ') + 1));
      expect(type == kind, row + " is a " + type + " in Java");
    }
    equal(copied, header);
  }

  private static void constantsAreTheHeaders() throws Exception {
    Map<String, Integer> ours = new TreeMap<>();
    for (Field field : Thimble.class.getFields())
      if (Modifier.isStatic(field.getModifiers())) ours.put("THIMBLE_" + field.getName(), field.getInt(null));
    Map<String, Integer> header = new TreeMap<>();
    object(layouts().get("constants")).forEach((name, value) -> header.put(name, (int) (long) (Long) value));
    equal(ours, header);
  }

  private static void functionsAreAllCalled() throws Exception {
    String source = Files.readString(ROOT.resolve("bindings/java/thimblejni.c"));
    for (Object function : (List<?>) layouts().get("functions"))
      if (!UNCALLED.contains(function)) expect(source.contains(function + "("), function + " is not called");
  }

  // ---- the conformance script ----

  /** Numbers with a fraction may differ by a hundredth; everything else must be equal. */
  static boolean same(Object given, Object expected) {
    if (expected instanceof Double) return given instanceof Double && Math.abs((Double) given - (Double) expected) <= 0.01;
    if (expected instanceof List<?> list) {
      if (!(given instanceof List<?> other) || other.size() != list.size()) return false;
      for (int i = 0; i < list.size(); i++) if (!same(other.get(i), list.get(i))) return false;
      return true;
    }
    if (!(expected instanceof Map<?, ?> fields)) return expected.equals(given);
    if (!(given instanceof Map<?, ?> others) || !others.keySet().equals(fields.keySet())) return false;
    return fields.entrySet().stream().allMatch(field -> same(others.get(field.getKey()), field.getValue()));
  }

  private static void conformance() throws Exception {
    Path file = Files.createTempFile("thimble", ".session");
    try {
      Runner runner = new Runner(ROOT, file);
      Map<String, Object> script = object(Json.parse(Files.readString(ROOT.resolve("bindings/conformance/script.json"))));
      for (Object item : (List<?>) script.get("steps")) {
        Map<String, Object> step = object(item);
        Object given = runner.run(step);
        expect(same(given, step.get("expect")), step + "\n gave " + given);
      }
    } finally {
      Files.deleteIfExists(file);
    }
  }

  // ---- features of the Java binding only ----

  private static Model open() {
    return Model.open(ROOT.resolve("models/thimble-demo-28m-q8_0.gguf"));
  }

  private static Options options() {
    Options options = new Options();
    options.threads = 2;
    options.device = "cpu";
    options.budgetBytes = 64 << 20;
    options.retention = Thimble.RETENTION_WINDOW;
    options.pool = 256;
    options.chunk = 128;
    return options;
  }

  private static ThimbleException thrown(Runnable action) {
    try {
      action.run();
    } catch (ThimbleException error) {
      return error;
    }
    throw new AssertionError("nothing was thrown");
  }

  private static void interrupt() throws Exception {
    try (Model model = open(); Session session = model.session(options())) {
      int[] ids = Arrays.copyOf(model.tokenize(Files.readAllBytes(ROOT.resolve("models/demo-book.txt")), 0), 2000);
      CompletableFuture<Void> stopper = CompletableFuture.runAsync(() -> {
        try {
          Thread.sleep(50);
        } catch (InterruptedException ignored) {
          Thread.currentThread().interrupt();
        }
        session.interrupt();
      });
      // A busy machine may wake the stopper after a reading has ended, so the session reads until it is stopped.
      long[] readings = {1};
      ThimbleException stopped = thrown(() -> {
        for (;; ++readings[0]) session.feed(ids);
      });
      equal(stopped.name(), "INTERRUPTED");
      stopper.join();
      session.feed(ids);
      equal(session.stats().position, 2000 * readings[0]);
    }
  }

  private static void lifetimes() {
    Model model = open();
    Session session = model.session(options());
    model.close();
    model.close();
    session.feed(new int[] {300, 301, 302});
    for (String piece : session.generate(4)) expect(!piece.isEmpty(), "an empty piece");
    session.close();
    expect(refused(session::stats).contains("closed"), "the session was used");
    expect(refused(model::info).contains("closed"), "the model was used");
  }

  private static String refused(Runnable action) {
    try {
      action.run();
    } catch (IllegalStateException | IllegalArgumentException refusal) {
      return refusal.getMessage();
    }
    return "nothing was thrown";
  }

  private static void errors() {
    ThimbleException missing = thrown(() -> Model.open(Path.of("no-such-file.gguf")));
    equal(missing.code, Thimble.IO);
    expect(missing.getMessage().contains("no-such-file.gguf"), missing.getMessage());
    try (Model one = open(); Model other = open(); Heads heads = other.heads(ROOT.resolve("models/thimble-demo-28m.locret.gguf"))) {
      Options options = options();
      options.heads = heads;
      expect(refused(() -> one.plan(options)).contains("another model"), "another model's heads were taken");
    }
    expect(Arrays.stream(Thimble.devices()).anyMatch(device -> device.name.equals("cpu")), "no processor");
  }
}
