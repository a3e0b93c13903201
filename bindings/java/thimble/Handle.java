package thimble;

import java.io.Closeable;
import java.util.function.LongConsumer;
import java.util.function.LongFunction;

/** Owns a pointer of the library and keeps alive what it needs. It is freed once it is closed and nothing needs it. */
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

  /** The pointer, even after close(), for objects that need this. */
  final synchronized long held() {
    return pointer;
  }

  /** Calls with the pointer, which stays valid during the call even if another thread closes this. */
  <T> T call(LongFunction<T> call) {
    long taken = enter();
    try {
      return call.apply(taken);
    } finally {
      leave();
    }
  }

  /** Works after close() too: the maker of a pointer that needs this still holds it. */
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

  /** Frees it. Objects that need it keep it in memory until they are closed too. */
  @Override
  public void close() {
    synchronized (this) {
      if (closed) return;
      closed = true;
    }
    leave();
  }
}
