package thimble;

/** The memory of a session: thimble_memory. Unsigned numbers keep their bits. */
public final class Memory {
  public int pool;
  public int capacity;
  public int chunk;
  public long budget;
  public long weights;
  public long shared;
  public long poolBytes;
  public long view;
  public long workspace;
  public long io;
  public long fixed;
  public long total;
  public long allocated;
  public long denseBytesPerToken;
  public long mapped;
  public long mappedResident;
  public long hostTables;
  public int largestPosition;
  public int selectionPays;
  public long states;
  public long stateSlots;
  public long draft;
  public long streamed;
  public long store;
  public long storeFile;
  public int finerLayers;
  public long recallBytes;

  Memory() {}
}
