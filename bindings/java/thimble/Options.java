package thimble;

/** Options of a session: thimble_session_options, initially the header's defaults. Policies are constants of {@link Thimble}. */
public final class Options {
  public long budgetBytes;
  public int retention;
  public int pool;
  /** A trained retainer of the model, or null. */
  public Heads heads;
  /** "auto" (null), "cpu", "cuda:0", "vulkan:0". */
  public String device;
  public int threads;
  public int retainScope;
  public int chunk;
  public int stabilizers;
  public int local;
  public int protectInit;
  public int maxNew;
  public int selection;
  public int selectK;
  public int selectInit;
  public int selectLocal;
  public float selectTheta;
  public int vote;
  public int voteScale;
  public int voteWindow;
  public int selectPrefill;
  public int positions;
  public int context;
  public int seed;
  public int selectPage;
  public int denseLayers;
  public int watch;
  public int rebuild;
  public int rebuildEvery;
  public int draft;
  public int draftTokens;
  /** The smaller model that drafts with {@link Thimble#DRAFT_MODEL}, or null. */
  public Model draftModel;
  public int recallFormat;
  public long recallMemBytes;
  public int recall;
  public int recallEvery;
  public int recallPrefill;
  public long recallDiskBytes;
  public int keyFormat;
  public int valueFormat;

  public Options() {
    Native.optionsInit(this);
  }
}
