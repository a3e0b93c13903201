package thimble;

/** A description of a model: thimble_model_info. Unsigned numbers keep their bits. */
public final class ModelInfo {
  public int hasWeights;
  public int hasTokenizer;
  public int layers;
  public int dModel;
  public int heads;
  public int kvHeads;
  public int headDim;
  public int dFf;
  public int vocab;
  public int contextLength;
  public int bos;
  public int eos;
  public int files;
  public long parameters;
  public long fileBytes;
  public long kvBytesPerToken;
  public String architecture;
  public String name;
  public String quantization;
  public String chatFormat;
  public String chatProblem;
  public int experts;
  public int expertsPerToken;
  public int window;
  public int windowLayers;

  ModelInfo() {}
}
