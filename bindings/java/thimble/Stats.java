package thimble;

/** What a session did: thimble_stats. Numbers without a sign are kept bit by bit. */
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

  Stats() {}
}
