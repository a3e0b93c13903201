package thimble;

/** The texts that a model may generate: {@link Model#grammar} makes one, {@link Session#setGrammar} takes it. */
public final class Grammar extends Handle {
  /** The language of a grammar's text: a JSON schema, a regular expression, or llama.cpp's notation. */
  public enum Kind { JSON_SCHEMA, REGEX, GBNF }

  Grammar(long pointer) {
    super(pointer, Native::grammarFree, null);
  }
}
