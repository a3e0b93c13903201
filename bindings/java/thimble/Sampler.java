package thimble;

/** How the next token is sampled: thimble_sampler_options; by default the most likely one is taken. */
public final class Sampler {
  public float temperature;
  public int topK;
  public float topP;
  public float minP;
  public float repeatPenalty;
  public int repeatLast;
  public long seed;
  public float presencePenalty;
  public float frequencyPenalty;

  public Sampler() {
    Native.samplerInit(this);
  }
}
