package thimble;

import java.util.List;

/** The static native methods of thimblejni.c. Handles are longs, texts are bytes, and names end with a NUL. */
final class Native {
  static {
    // Load the library first, so that the loader finds it for thimblejni wherever it is stored.
    String library = System.getenv("THIMBLE_LIBRARY");
    if (library != null) System.load(library);
    String jni = System.getenv("THIMBLE_JNI");
    if (jni != null) {
      System.load(jni);
    } else {
      System.loadLibrary("thimblejni");
    }
    if (abiVersion() < Thimble.ABI)
      throw new UnsatisfiedLinkError("libthimble has ABI " + abiVersion() + ", these classes need " + Thimble.ABI);
  }

  private Native() {}

  static native int abiVersion();
  static native byte[] version();
  static native byte[] buildInfo();
  static native byte[] statusName(int status);
  static native int deviceCount();
  static native void deviceGet(int index, Device out);

  static native long modelOpen(byte[] path, List<String> warnings);
  static native void modelFree(long model);
  static native void modelInfo(long model, ModelInfo out);
  static native long headsOpen(long model, byte[] path);
  static native void headsFree(long heads);
  static native int headsRetention(long heads);
  static native long grammarCreate(long model, int kind, byte[] text);
  static native void grammarFree(long grammar);
  static native int[] tokenize(long model, byte[] text, int flags);
  static native byte[] detokenize(long model, int[] ids, int flags);
  static native boolean tokenEnds(long model, int token);
  static native byte[] chat(long model, byte[] messages, int flags, long held, byte[] format, byte[] source, byte[] variables);

  static native void optionsInit(Options out);
  static native void samplerInit(Sampler out);
  static native void plan(long model, Options options, byte[] device, long heads, long drafter, Memory out);
  static native int largestPool(long model, Options options, byte[] device, long heads, long drafter);

  static native long sessionCreate(long model, Options options, byte[] device, long heads, long drafter);
  static native void sessionFree(long session);
  static native void interrupt(long session);
  static native void feed(long session, int[] tokens);
  static native void flush(long session);
  static native int step(long session);
  static native void accept(long session, int token);
  static native byte[] text(long session, int token);
  static native float[] logits(long session);
  static native void score(long session, int[] tokens, float[] logprobs);
  static native void rewind(long session, long position);
  static native void reset(long session);
  static native long sessionClone(long session);
  static native int[] kept(long session, int layer, int kvHead);
  static native float[] keptByPosition(long session);
  static native float[] attendedByPosition(long session);
  static native float[] storedByPosition(long session);
  static native void setSampler(long session, Sampler sampler);
  static native void setBias(long session, int[] tokens, float[] biases);
  static native void setGrammar(long session, long grammar);
  static native void memory(long session, Memory out);
  static native byte[] options(long session, Options out);
  static native void stats(long session, Stats out);
  static native void save(long session, byte[] path, byte[] note);
  static native void restore(long session, byte[] path);
  static native long shrink(long session, int pool);
  static native byte[] sessionFileInfo(byte[] path);
  static native byte[] sessionFileNote(byte[] path);

  static native byte[] rows(); // for the tests
}
