package thimble;

/** A trained retainer of a model: {@link Model#heads} opens it, {@link Options#heads} takes it. */
public final class Heads extends Handle {
  final Model model;

  Heads(Model model, long pointer) {
    super(pointer, Native::headsFree, model);
    this.model = model;
  }

  /** The retention that the heads serve: {@link Thimble#RETENTION_LOCRET}, or RETENTION_KEYDIFF or _MIX where their training found
   * that better, or RETENTION_ADORE for its controller. */
  public int retention() {
    return call(Native::headsRetention);
  }
}
