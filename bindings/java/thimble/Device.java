package thimble;

/** A device of this machine: thimble_device_info. Numbers without a sign are kept bit by bit. */
public final class Device {
  public long totalBytes;
  public long freeBytes;
  public String name;
  public String description;

  Device() {}
}
