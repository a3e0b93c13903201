package thimble;

import java.util.ArrayList;
import java.util.List;

/** Messages of a conversation, and how they become text: {@link Model#chat}. */
public final class Chat {
  /** End where the answer begins. */
  public boolean assistant = true;
  /** The number of leading messages that the session already holds. */
  public long held;
  /** A known format's name instead of the model's template, or null. */
  public String format;
  /** A Jinja template to run instead of the model's, or null. */
  public String template;
  /** Further variables for the template, a JSON object, or null. */
  public String variables;

  private final List<String> messages = new ArrayList<>();

  /** Adds a message of "system", "user", "assistant". */
  public Chat add(String role, String content) {
    messages.add("{\"role\":" + quoted(role) + ",\"content\":" + quoted(content) + "}");
    return this;
  }

  String json() {
    return "[" + String.join(",", messages) + "]";
  }

  private static String quoted(String text) {
    StringBuilder json = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') {
        json.append('\\').append(c);
      } else if (c < ' ') {
        json.append(String.format("\\u%04x", (int) c));
      } else {
        json.append(c);
      }
    }
    return json.append('"').toString();
  }
}
