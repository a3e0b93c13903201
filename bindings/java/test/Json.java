package thimble;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A minimal JSON reader for the files of the tests: maps, lists, Strings, Longs, Doubles, Booleans. */
final class Json {
  private final String text;
  private int at;

  private Json(String text) {
    this.text = text;
  }

  static Object parse(String text) {
    Json json = new Json(text.strip());
    Object value = json.value();
    if (json.at != json.text.length()) throw new IllegalArgumentException("more text at " + json.at);
    return value;
  }

  private boolean take(String token) {
    while (at < text.length() && text.charAt(at) <= ' ') at++;
    if (!text.startsWith(token, at)) return false;
    at += token.length();
    return true;
  }

  private void need(String token) {
    if (!take(token)) throw new IllegalArgumentException(token + " is missing at " + at);
  }

  private Object value() {
    if (take("{")) return object();
    if (take("[")) return list();
    if (take("true")) return true;
    if (take("false")) return false;
    if (take("null")) return null;
    return text.charAt(at) == '"' ? string() : number();
  }

  private Map<String, Object> object() {
    Map<String, Object> fields = new LinkedHashMap<>();
    if (take("}")) return fields;
    do {
      take(""); // space
      String name = string();
      need(":");
      fields.put(name, value());
    } while (take(","));
    need("}");
    return fields;
  }

  private List<Object> list() {
    List<Object> items = new ArrayList<>();
    if (take("]")) return items;
    do {
      items.add(value());
    } while (take(","));
    need("]");
    return items;
  }

  private Object number() {
    int from = at;
    while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) at++;
    String number = text.substring(from, at);
    if (number.matches("-?\\d+")) return Long.valueOf(number);
    return Double.valueOf(number);
  }

  private String string() {
    need("\"");
    StringBuilder out = new StringBuilder();
    while (text.charAt(at) != '"') {
      char c = text.charAt(at++);
      if (c == '\\') c = escaped();
      out.append(c);
    }
    at++;
    return out.toString();
  }

  private char escaped() {
    char c = text.charAt(at++);
    switch (c) {
      case 'n': return '\n';
      case 't': return '\t';
      case 'u':
        at += 4;
        return (char) Integer.parseInt(text.substring(at - 4, at), 16);
      default: return c;
    }
  }
}
