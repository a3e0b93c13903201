import java.nio.file.Files;
import java.nio.file.Path;
import thimble.Model;
import thimble.Options;
import thimble.Session;
import thimble.Thimble;
import thimble.ThimbleException;

/** Reads a text inside 64 MiB and streams what comes next: java Read.java MODEL.gguf TEXT.txt */
public final class Read {
  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 2) {
      System.err.println("usage: java Read.java MODEL.gguf TEXT.txt");
      System.exit(2);
    }
    Options options = new Options();
    options.budgetBytes = 64 << 20;
    options.retention = Thimble.RETENTION_WINDOW;
    options.pool = 1024;
    try (Model model = Model.open(Path.of(arguments[0])); Session session = model.session(options)) {
      session.feed(model.tokenize(Files.readAllBytes(Path.of(arguments[1])), Thimble.TOKENIZE_ADD_BOS));
      for (String piece : session.generate(64)) {
        System.out.print(piece);
        System.out.flush();
      }
      System.out.println();
    } catch (ThimbleException error) {
      System.err.println("read: " + error.getMessage());
      System.exit(1);
    }
  }
}
