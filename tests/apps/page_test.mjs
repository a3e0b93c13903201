// The page of thimble serve in a browser, Debian's chromium driven by npm's package puppeteer-core:
//   node page_test.mjs COMMAND SOURCE_FOLDER CHROMIUM [FOLDER_FOR_SCREENSHOTS], with the package in a node_modules beside or
//   above the working folder
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const puppeteer = (await import(pathToFileURL(createRequire(process.cwd() + "/").resolve("puppeteer-core")))).default;

const [command, source, chromium, screenshots] = process.argv.slice(2);
const book = readFileSync(source + "/models/demo-book.txt", "utf8");
const server = spawn(command, ["serve", "--device", "cpu", "-m", source + "/models/thimble-demo-28m-q8_0.gguf", "--heads",
                               source + "/models/thimble-demo-28m.heads.gguf", "--pool", "1024", "--mem-budget", "64MiB", "--port",
                               "0", "--api-key", "secret"]);
process.on("exit", () => server.kill());
const origin = await new Promise((found) => {
  let text = "";
  server.stderr.on("data", (piece) => {
    const match = (text += piece).match(/http:\/\/\S+:\d+/);
    if (match) found(match[0]);
  });
});

const browser = await puppeteer.launch({ executablePath: chromium, args: process.getuid() === 0 ? ["--no-sandbox"] : [] });
const page = await browser.newPage();
const complaints = [], elsewhere = [];
page.on("pageerror", (error) => complaints.push(error.message));
page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
page.on("request", (request) => request.url().startsWith(origin) || request.url().startsWith("data:") || elsewhere.push(request.url()));

const textOf = (selector) => page.$eval(selector, (element) => element.textContent);
const attribute = (name) => page.$eval("#map", (map, name) => map.getAttribute(name), name);
const idle = () => page.waitForSelector("#send", { visible: true, timeout: 60000 });
const overflow = () => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
const shoot = (name) => screenshots && page.screenshot({ path: `${screenshots}/page-${name}.png` });

async function drop(name, text) {
  await page.evaluate((name, text) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
  }, name, text);
  await page.waitForFunction((name) => document.getElementById("name").textContent.startsWith(name), {}, name);
}

async function ask(question) {
  await page.type("#question", question);
  await page.keyboard.press("Enter");
}

// The key is asked for once.
await page.setViewport({ width: 1280, height: 800 });
await page.goto(origin + "/");
await page.waitForSelector("#door[open]");
await page.type("#key", "secret");
await page.keyboard.press("Enter");
await page.waitForFunction(() => /^[\d,]+ of 67,108,864 bytes$/.test(document.getElementById("bytes").textContent));
assert.equal(complaints.length, 1);  // the 401, by the browser
complaints.length = 0;

// A text is dropped, a question asked, and the answer comes, with the passage that it is in.
const question = "What is the door code of the Lisbon warehouse?";
await drop("story.txt", book.slice(0, 16000));
await ask(question);
await page.waitForSelector("article.answer .text:not(:empty)", { timeout: 60000 });
await idle();
assert.equal(await textOf("article.answer .text"), "40917");
assert.equal(await textOf("article.user .text"), question);
assert.equal(await page.$eval("article.answer", (article) => article.ariaBusy), "false");
await page.waitForSelector("article.answer a");
const links = await page.$$eval("article.answer a", (all) => all.map((link) => link.textContent));
assert.ok(links.length <= 3 && links.some((text) => text.includes("door code of the Lisbon warehouse is 40917")), String(links));

// The map has the text's sentences in more than one shade.
const sentences = Number(await attribute("aria-valuemax"));
assert.ok(sentences > 150, String(sentences));
const shades = await page.$eval("#map", (map) => {
  const pixels = map.getContext("2d").getImageData(0, 0, map.width, map.height).data, found = new Set();
  for (let i = 0; i < pixels.length; i += 4) found.add(pixels.slice(i, i + 3).join());
  return found.size;
});
assert.ok(shades > 5, String(shades));

// The keyboard and links choose a sentence, whose counts come by layer and head.
await page.focus("#map");
await page.keyboard.press("End");
assert.equal(await attribute("aria-valuenow"), String(sentences));
await page.keyboard.press("ArrowLeft");
assert.equal(await attribute("aria-valuenow"), String(sentences - 1));
await page.keyboard.press("Home");
await page.keyboard.press("ArrowDown");
assert.ok(Number(await attribute("aria-valuenow")) > 2);
await page.evaluate(() => [...document.querySelectorAll("article.answer a")].find((a) => a.textContent.includes("40917")).focus());
await page.keyboard.press("Enter");
assert.equal(await page.evaluate(() => document.activeElement.id), "map");
assert.equal((await textOf("#passage")).trim(), "The door code of the Lisbon warehouse is 40917.");
const [, first, last, share] = (await textOf("#figures")).match(/Tokens ([\d,]+) to ([\d,]+), held by ([\d.]+) %/);
const tokens = Number(last.replace(",", "")) - Number(first.replace(",", "")) + 1;
await page.waitForFunction(() => document.querySelectorAll("#heads[aria-busy=false] td").length === 16);  // 8 layers of 2 heads
const held = await page.$$eval("#heads td", (cells) => cells.reduce((sum, cell) => sum + Number(cell.textContent), 0));
assert.ok(Math.abs(100 * held / (16 * tokens) - share) < 0.1, `${held} of 16 times ${tokens}, ${share} %`);  // 3 digits are shown
const outline = await page.$eval("#map", (map) => getComputedStyle(map).outlineStyle);
assert.notEqual(outline, "none");
assert.equal(await overflow(), 0);
await shoot("wide");

// What looks like HTML is text; the conversation goes on.
await ask("<b>Who</b> is in the house?");
await page.waitForFunction(() => document.querySelectorAll("article.answer").length === 2);
await idle();
assert.equal(await page.$("#log b"), null);
assert.equal(await page.$eval("article.user:nth-of-type(3) .text", (body) => body.textContent), "<b>Who</b> is in the house?");

// A phone, in the dark.
await page.setViewport({ width: 360, height: 740, deviceScaleFactor: 2 });
await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
assert.equal(await overflow(), 0);
const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number));
assert.ok(Math.max(...back) < 64, String(back));
await page.click("#map");  // its middle
await page.waitForSelector("#heads[aria-busy=false]");
assert.notEqual(await attribute("aria-valuenow"), "1");
await shoot("phone");
if (screenshots) await page.screenshot({ path: screenshots + "/page-phone-whole.png", fullPage: true });

// A long text shows how far it is read, and is stopped; the question comes back.
await drop("book.txt", book);
await ask("What is this?");
await page.waitForFunction(() => /[\d,]+ of 5\d,\d+ tokens, [\d,]+ a second, \d+ s left/.test(document.getElementById("rate").textContent),
                           { timeout: 60000 });
await shoot("reading");
assert.equal(await overflow(), 0);
await page.click("#stop");
await idle();
assert.equal(await page.$eval("#question", (box) => box.value), "What is this?");
assert.equal(await page.$eval("#progress", (box) => box.hidden), true);
assert.equal((await page.$$("article")).length, 0);

assert.deepEqual(elsewhere, []);
assert.deepEqual(complaints.filter((text) => !text.includes("409")), []);  // a slot still at work, by the browser
assert.equal(await textOf("#problem"), "");
await browser.close();
server.kill("SIGTERM");
assert.equal(await new Promise((ended) => server.on("exit", ended)), 0);
console.log("the page works in chromium");
process.exit(0);
