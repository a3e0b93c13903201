package thimble;

/** A device of this machine: thimble_device_info. Unsigned numbers keep their bits. */
public final class Device {
  public long totalBytes;
  public long freeBytes;
  public String name;
  public String description;

  Device() {}
}
