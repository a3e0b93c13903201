package thimble;

import java.nio.charset.StandardCharsets;
import java.nio.file.Path;

/** The constants of thimble.h without their prefix, and the functions that need no model. */
public final class Thimble {
  public static final int ABI = 14;

  public static final int TOKENIZE_ADD_BOS = 1;
  public static final int TOKENIZE_PARSE_SPECIAL = 2;
  public static final int DETOKENIZE_SPECIAL = 1;
  public static final int CHAT_ADD_ASSISTANT = 1;
  /** The default, for the fields that accept it; it is the largest unsigned number. */
  public static final int DEFAULT = -1;
  /** For Options.recall: everything in the store. */
  public static final int RECALL_ALL = -1;

  public static final int OK = 0;
  public static final int INVALID_ARGUMENT = 10;
  public static final int UNSUPPORTED = 11;
  public static final int IO = 20;
  public static final int FORMAT = 21;
  public static final int MISMATCH = 22;
  public static final int BUDGET = 30;
  public static final int OUT_OF_MEMORY = 31;
  public static final int CONTEXT_FULL = 40;
  public static final int CANNOT_REWIND = 41;
  public static final int INTERRUPTED = 50;
  public static final int BUSY = 51;
  public static final int DEVICE_LOST = 60;
  public static final int NOT_FINITE = 61;
  public static final int INTERNAL = 90;

  public static final int RETENTION_DEFAULT = -1;
  public static final int RETENTION_NONE = 0;
  public static final int RETENTION_WINDOW = 1;
  public static final int RETENTION_RANDOM = 2;
  public static final int RETENTION_LOCRET = 3;
  public static final int RETENTION_KEYDIFF = 4;
  public static final int RETENTION_TOVA = 5;
  public static final int RETENTION_REREAD = 6;
  public static final int RETENTION_ADORE = 7;
  public static final int RETENTION_MIX = 8;
  public static final int RETAIN_PER_HEAD = 0;
  public static final int RETAIN_LAYER = 1;
  public static final int SELECTION_DENSE = 0;
  public static final int SELECTION_TOKENSELECT = 1;
  public static final int SELECTION_QUEST = 2;
  public static final int VOTE_AUTO = 0;
  public static final int VOTE_LAYER = 1;
  public static final int VOTE_GROUP = 2;
  public static final int KV_F16 = 0;
  public static final int KV_Q8_0 = 1;
  public static final int KV_Q4_0 = 2;
  public static final int POSITIONS_LIST = 0;
  public static final int POSITIONS_ORIGINAL = 1;
  public static final int SCALE_NONE = 0;
  public static final int SCALE_SQRT = 1;

  public static final int DRAFT_NONE = 0;
  public static final int DRAFT_LOOKUP = 1;
  public static final int DRAFT_MODEL = 2;
  public static final int DRAFT_MTP = 3;

  private Thimble() {}

  /** The version of the library that runs, "0.1.0". */
  public static String version() {
    return text(Native.version());
  }

  /** What was built into the library, for bug reports. */
  public static String buildInfo() {
    return text(Native.buildInfo());
  }

  /** The devices of this machine; their names are values of {@link Options#device}. */
  public static Device[] devices() {
    Device[] devices = new Device[Native.deviceCount()];
    for (int i = 0; i < devices.length; i++) Native.deviceGet(i, devices[i] = new Device());
    return devices;
  }

  /** A description of a saved session's file, as a JSON object. */
  public static String sessionFileInfo(Path path) {
    return text(Native.sessionFileInfo(terminated(path.toString())));
  }

  /** The note that was passed to {@link Session#save}. */
  public static byte[] sessionFileNote(Path path) {
    return Native.sessionFileNote(terminated(path.toString()));
  }

  static String text(byte[] utf8) {
    return new String(utf8, StandardCharsets.UTF_8);
  }

  static byte[] bytes(String text) {
    return text == null ? null : text.getBytes(StandardCharsets.UTF_8);
  }

  /** A name as C reads it. */
  static byte[] terminated(String name) {
    if (name == null) return null;
    if (name.indexOf('\0') >= 0) throw new IllegalArgumentException("a name or path contains a NUL character");
    return bytes(name + '\0');
  }
}
