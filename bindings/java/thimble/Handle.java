package thimble;

import java.io.Closeable;
import java.util.function.LongConsumer;
import java.util.function.LongFunction;

/** Owns a pointer of the library's, and holds on to what it needs. Freed when it was closed and nothing needs it any more. */
abstract class Handle implements Closeable {
  private final LongConsumer free;
  private final Handle needs; // or null
  private long pointer;
  private int users = 1;
  private boolean closed;

  Handle(long pointer, LongConsumer free, Handle needs) {
    this.pointer = pointer;
    this.free = free;
    this.needs = needs;
    if (needs != null) needs.hold();
  }

  /** The pointer, closed or not: for who needs this. */
  final synchronized long held() {
    return pointer;
  }

  /** Calls with the pointer, which stays good meanwhile even if another thread closes this. */
  <T> T call(LongFunction<T> call) {
    long taken = enter();
    try {
      return call.apply(taken);
    } finally {
      leave();
    }
  }

  /** Closed or not: whoever made a pointer that needs this holds it still. */
  private synchronized void hold() {
    users++;
  }

  private synchronized long enter() {
    if (closed) throw new IllegalStateException("this " + getClass().getSimpleName() + " is closed");
    users++;
    return pointer;
  }

  private void leave() {
    synchronized (this) {
      if (--users > 0) return;
      free.accept(pointer);
      pointer = 0;
    }
    if (needs != null) needs.leave();
  }

  /** Gives it back. What still needs it keeps it in memory until that is closed, too. */
  @Override
  public void close() {
    synchronized (this) {
      if (closed) return;
      closed = true;
    }
    leave();
  }
}
