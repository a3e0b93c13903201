package thimble;

/** How the next token is chosen: thimble_sampler_options; so made, the most likely one. */
public final class Sampler {
  public float temperature;
  public int topK;
  public float topP;
  public float minP;
  public float repeatPenalty;
  public int repeatLast;
  public long seed;

  public Sampler() {
    Native.samplerInit(this);
  }
}
