// Reads a text inside 64 MiB and streams what comes next: node example.js MODEL.gguf TEXT.txt
import { readFileSync } from 'node:fs';
import { Model, ThimbleError } from 'thimble';

async function main(modelPath, textPath) {
  const stop = new AbortController();
  process.once('SIGINT', () => stop.abort()); // Ctrl-C stops the reading or the answer
  const model = new Model(modelPath);
  try {
    const session = await model.session({ budgetBytes: 64 * 2 ** 20, retention: 'window', pool: 1024 });
    try {
      await session.feed(model.tokenize(readFileSync(textPath), { bos: true }), { signal: stop.signal });
      for await (const piece of session.generate({ limit: 64, signal: stop.signal })) process.stdout.write(piece);
      process.stdout.write('\n');
    } finally {
      await session.close();
    }
  } finally {
    model.close();
  }
}

if (process.argv.length !== 4) {
  console.error('usage: node example.js MODEL.gguf TEXT.txt');
  process.exitCode = 2;
} else {
  await main(process.argv[2], process.argv[3]).catch((error) => {
    if (!(error instanceof ThimbleError) && error.name !== 'AbortError') throw error;
    console.error(`example: ${error.message}`);
    process.exitCode = 1;
  });
}
