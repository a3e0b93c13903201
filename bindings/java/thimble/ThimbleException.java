package thimble;

import java.nio.charset.StandardCharsets;

/** A call failed. */
public final class ThimbleException extends RuntimeException {
  private static final long serialVersionUID = 1;

  /** The code in thimble.h, such as {@link Thimble#BUDGET}. */
  public final int code;
  /** For BUDGET: the bytes that the budget lacks, otherwise 0. */
  public final long bytesMissing;

  ThimbleException(int code, byte[] message, long bytesMissing) { // called from thimblejni.c
    super(new String(message, StandardCharsets.UTF_8));
    this.code = code;
    this.bytesMissing = bytesMissing;
  }

  /** The code's name, "BUDGET". */
  public String name() {
    return Thimble.text(Native.statusName(code));
  }
}
