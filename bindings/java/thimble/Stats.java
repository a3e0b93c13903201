package thimble;

/** The counters of a session: thimble_stats. Unsigned numbers keep their bits. */
public final class Stats {
  public int entries;
  public long position;
  public long waiting;
  public long evicted;
  public long evictions;
  public long generated;
  public long selected;
  public long cacheHits;
  public long cacheMisses;
  public long prefillTokens;
  public double prefillSeconds;
  public double decodeSeconds;
  public double prefillBytes;
  public double prefillFlop;
  public double decodeBytes;
  public double decodeFlop;
  public long saturated;
  public long stored;
  public long recalled;

  Stats() {}
}
