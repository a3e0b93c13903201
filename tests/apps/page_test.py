"""Tests the page of thimble serve in Debian's Chromium: page_test.py COMMAND SOURCE_FOLDER

Needs Debian's python3-selenium and chromium-driver. If PAGE_SCREENSHOTS names a folder, screenshots are stored there.
"""
import http.client
import http.server
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import unittest

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import serve_tools
from serve_client import BOOK, HEADS, Server

KEY = "secret"
TEXT = BOOK[:16000]
QUESTION = "What is the door code of the Lisbon warehouse?"
SENTENCE = "The door code of the Lisbon warehouse is 40917."
PATIENCE = 120  # seconds; on a busy machine reading takes long


def chromium():
    options = Options()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.getuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)


class Page(unittest.TestCase):
    """One browser and one server; each test reloads the page."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server("--device", "cpu", "--heads", HEADS, "--pool", "1024", "--mem-budget", "64MiB", "--api-key", KEY)
        cls.origin = f"http://127.0.0.1:{cls.server.port}/"
        cls.browser = chromium()

    @classmethod
    def tearDownClass(cls):
        cls.browser.quit()
        assert cls.server.stop()[0] == 0

    def setUp(self):
        self.look(1280, 800)
        self.browser.get(self.origin)
        self.wait(lambda: self.browser.find_elements(By.CSS_SELECTOR, "#door[open]"))
        self.browser.get_log("browser")  # has the 401, by the browser
        self.browser.get_log("performance")
        self.browser.find_element(By.ID, "key").send_keys(KEY, Keys.ENTER)
        self.wait(lambda: re.fullmatch(r"[\d,]+ of [\d,]+ bytes", self.text("#bytes")))

    def tearDown(self):
        complaints = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        # The browser logs every error that the server answers with.
        self.assertEqual([text for text in complaints if "the server responded with a status of" not in text], [])
        urls = [message["params"]["request"]["url"] for message in self.messages() if message["method"] == "Network.requestWillBeSent"]
        self.assertEqual([url for url in urls if not url.startswith((self.origin, "data:"))], [])

    def messages(self):
        return [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]

    # ---- what a person does and sees ----

    def wait(self, condition):
        try:
            return WebDriverWait(self.browser, PATIENCE, poll_frequency=0.1).until(lambda _: condition())
        except TimeoutException:
            self.shoot("failed")
            raise AssertionError("the page never came to that: " + self.find("body").text) from None

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    def run_script(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def idle(self):
        self.wait(lambda: self.find("#send").is_displayed())

    def focused(self):
        return self.browser.switch_to.active_element

    def look(self, width, height, dark=False):
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def shoot(self, name):
        if "PAGE_SCREENSHOTS" in os.environ:
            self.browser.save_screenshot(f"{os.environ['PAGE_SCREENSHOTS']}/{name}.png")

    def assert_fits(self):
        """Checks that the page is not wider than the window."""
        self.assertEqual(self.run_script("const e = document.documentElement; return e.scrollWidth - e.clientWidth"), 0)

    def drop(self, name, text):
        self.run_script("""
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([arguments[1]], arguments[0], {type: "text/plain"}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));""", name, text)
        self.wait(lambda: self.text("#name").startswith(name))

    def ask(self, question):
        """Asks a question and returns the answer."""
        before = len(self.all("article.answer"))
        self.find("#question").send_keys(question, Keys.ENTER)
        self.wait(lambda: len(self.all("article.answer")) > before)
        self.idle()
        return self.all("article.answer .text")[-1].text

    def shades(self):
        """The colours of the map, as a set of (red, green, blue)."""
        return {tuple(colour) for colour in self.run_script("""
            const map = document.getElementById("map"), found = new Set();
            const {data} = map.getContext("2d").getImageData(0, 0, map.width, map.height);
            for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
            return [...found].map((colour) => colour.split(",").map(Number));""")}

    def colour(self, name):
        """One of the page's colours, written #rrggbb."""
        value = self.run_script("return getComputedStyle(document.body).getPropertyValue('--' + arguments[0])", name).strip()
        return tuple(bytes.fromhex(value[1:]))

    def change(self, **fields):
        """Opens the settings, fills them in by keyboard, and sends them."""
        self.find("#change").send_keys(Keys.ENTER)
        self.wait(lambda: self.all("#settings[open]"))
        for name, value in fields.items():
            field = self.find("#" + name.replace("_", "-"))
            if field.tag_name == "select":
                Select(field).select_by_visible_text(value)
            else:
                field.clear()
                field.send_keys(value)
        self.find("#pool").send_keys(Keys.ENTER)

    # ---- tests ----

    def test_an_answer_comes_with_its_passage_and_the_map_shows_what_is_held(self):
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(TEXT)
            file.flush()
            self.find("#file").send_keys(file.name)
            self.wait(lambda: self.text("#name").startswith(os.path.basename(file.name)))
        self.assertEqual(self.ask(QUESTION), "40917")
        self.assertEqual(self.text("article.user .text"), QUESTION)
        self.assertEqual(self.find("article.answer").get_attribute("aria-busy"), "false")
        links = [link.text for link in self.all("article.answer a")]
        self.assertTrue(len(links) <= 3 and SENTENCE in links, links)
        self.assertEqual(self.all(".gone"), [])
        self.assertFalse(self.find("#lost").is_displayed())
        self.assertGreater(len(self.shades()), 5)
        self.assertFalse(self.colour("error") in self.shades())
        # The keyboard selects a sentence.
        sentences = int(self.find("#map").get_attribute("aria-valuemax"))
        self.assertGreater(sentences, 150)
        for keys, now in ((Keys.END, sentences), (Keys.ARROW_LEFT, sentences - 1), (Keys.HOME, 1)):
            self.find("#map").send_keys(keys)
            self.assertEqual(self.find("#map").get_attribute("aria-valuenow"), str(now))
        self.find("#map").send_keys(Keys.ARROW_DOWN)
        self.assertGreater(int(self.find("#map").get_attribute("aria-valuenow")), 2)
        # A link also selects a sentence. The counts of the sentence come by layer and head: 8 layers of 2.
        self.all("article.answer a")[links.index(SENTENCE)].send_keys(Keys.ENTER)
        self.assertEqual(self.focused().get_attribute("id"), "map")
        self.assertNotEqual(self.find("#map").value_of_css_property("outline-style"), "none")
        self.assertEqual(self.text("#passage").strip(), SENTENCE)
        first, last, share = re.match(r"Tokens ([\d,]+) to ([\d,]+), held by ([\d.]+) %", self.text("#figures")).groups()
        tokens = int(last.replace(",", "")) - int(first.replace(",", "")) + 1
        self.wait(lambda: len(self.all("#heads[aria-busy=false] td")) == 16)
        held = sum(int(cell.text) for cell in self.all("#heads td"))
        self.assertAlmostEqual(100 * held / (16 * tokens), float(share), delta=0.1)  # 3 digits are shown
        self.assert_fits()
        self.shoot("wide")
        # An answer has the form that is asked for; a wrong form is explained.
        self.find("#form summary").click()
        schema = {"type": "object", "properties": {"code": {"enum": ["40917"]}}, "required": ["code"], "additionalProperties": False}
        self.find("#schema").send_keys(json.dumps(schema))
        self.assertEqual(json.loads(self.ask(QUESTION)), {"code": "40917"})
        self.find("#schema").send_keys("}")
        self.find("#question").send_keys("Who?", Keys.ENTER)
        self.wait(lambda: "JSON schema" in self.text("#problem"))
        self.idle()
        for field in ("#schema", "#question"):
            self.find(field).clear()
        # Text that looks like HTML is shown as text, and the conversation continues.
        self.ask("<b>Who</b> is in the house?")
        self.assertEqual(self.all("#log b"), [])
        self.assertEqual(self.all("article.user .text")[2].text, "<b>Who</b> is in the house?")
        # On a phone, in the dark.
        self.look(360, 740, dark=True)
        self.assert_fits()
        back = re.findall(r"\d+", self.find("body").value_of_css_property("background-color"))[:3]
        self.assertLess(max(map(int, back)), 64)
        self.find("#map").click()  # its middle
        self.assertNotEqual(self.find("#map").get_attribute("aria-valuenow"), "1")
        self.wait(lambda: self.all("#heads[aria-busy=false]"))
        self.shoot("phone")

    def test_policies_change_and_evicted_sentences_are_marked(self):
        self.drop("story.txt", TEXT)
        self.change(retention="window", pool="256", budget="48")
        self.wait(lambda: not self.all("#settings[open]"))
        self.wait(lambda: "window, pool of 256" in self.text("#model") and " of 50,331,648 bytes" in self.text("#bytes"))
        self.assertNotEqual(self.ask(QUESTION), "40917")
        # The answer says that the sentence is gone, and the map marks it.
        self.assertIn("was evicted: no head holds any of “" + SENTENCE + "”", self.text(".gone"))
        self.assertTrue(self.find("#lost").is_displayed())
        self.assertTrue(self.colour("error") in self.shades())
        self.find(".gone a").send_keys(Keys.ENTER)
        self.assertEqual(self.text("#passage").strip(), SENTENCE)
        self.assertIn("most of it was evicted", self.text("#figures"))
        self.assertIn("evicted", self.find("#map").get_attribute("aria-valuetext"))
        self.shoot("gone")
        # A refusal of the server is shown where the value was entered, and changes nothing.
        self.change(pool="10000000", budget="")
        self.wait(lambda: "lacks" in self.text("#refusal"))
        self.assertTrue(self.find("#settings").is_displayed())
        self.assertIn("window, pool of 256", self.text("#model"))
        # The dialog on a phone, in the dark.
        self.look(360, 740, dark=True)
        self.assert_fits()
        for field in self.all("#settings button, #settings input, #settings select"):
            box = field.rect
            self.assertTrue(box["x"] >= 0 and box["x"] + box["width"] <= 360, box)
        self.shoot("settings-phone")
        self.look(1280, 800)
        self.shoot("settings")
        # A value above the one that the server was started with is not sent at all. Escape leaves everything
        # unchanged.
        budget = self.find("#budget")
        budget.clear()
        budget.send_keys("65", Keys.ENTER)
        self.assertFalse(self.run_script("return arguments[0].checkValidity()", budget))
        self.assertIn("at most 64", self.text("#ceiling"))
        budget.send_keys(Keys.ESCAPE)
        self.wait(lambda: not self.all("#settings[open]"))
        self.assertEqual(self.focused().get_attribute("id"), "change")
        # The number of selected entries is asked for only with a selection. The document is still there.
        self.change(retention="auto", pool="1024", selection="tokenselect", select_k="64", budget="64")
        self.wait(lambda: self.text("#model").endswith("mix, pool of 1,024, tokenselect"))
        self.assertEqual(self.server_settings()["select-k"], 64)
        self.assertTrue(self.text("#name").startswith("story.txt"))
        self.assertEqual(self.all("article"), [])
        self.change(selection="dense")
        self.wait(lambda: self.text("#model").endswith("mix, pool of 1,024"))

    def server_settings(self):
        return self.server.ask("GET", "/thimble/state", headers={"x-api-key": KEY})[2]["settings"]

    def test_reading_shows_how_far_it_is_and_can_be_stopped(self):
        self.drop("book.txt", BOOK)
        self.find("#question").send_keys("What is this?", Keys.ENTER)
        self.wait(lambda: re.search(r"[\d,]+ of 5\d,\d+ tokens, [\d,]+ a second, [\d,]+ s left", self.text("#rate")))
        self.assertFalse(self.find("#change").is_enabled())
        self.assert_fits()
        self.shoot("reading")
        self.find("#stop").click()
        self.idle()
        self.assertEqual(self.find("#question").get_attribute("value"), "What is this?")
        self.assertFalse(self.find("#progress").is_displayed())
        self.assertEqual(self.all("article"), [])
        self.wait(lambda: self.find("#change").is_enabled())



class Behind(http.server.BaseHTTPRequestHandler):
    """Tests with a proxy that serves the page below /llm, under its own name."""

    server_port = 0

    def answer(self):
        if not self.path.startswith("/llm"):
            return self.send_error(404)
        to = http.client.HTTPConnection("127.0.0.1", self.server_port)
        size = int(self.headers.get("Content-Length") or 0)
        to.request(self.command, self.path[4:] or "/", self.rfile.read(size), dict(self.headers))
        response = to.getresponse()
        data = response.read()
        to.close()
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


class BehindAProxy(unittest.TestCase):
    def test_the_page_asks_below_its_own_path(self):
        server = Server("--device", "cpu", "--heads", HEADS, "--pool", "1024", "--allowed-host", "box.localhost")
        Behind.server_port = server.port
        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Behind)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        browser = chromium()
        try:
            for path in ("/llm/", "/llm"):
                browser.get(f"http://box.localhost:{proxy.server_port}{path}")
                WebDriverWait(browser, PATIENCE).until(
                    lambda _: "pool of" in browser.find_element(By.CSS_SELECTOR, "#model").text)
        finally:
            browser.quit()
            proxy.shutdown()
            proxy.server_close()
        self.assertEqual(server.stop()[0], 0)


class Chain(unittest.TestCase):
    """A browser, and a server with a model of serve_tools.py."""
    model_of = ()  # template, special tokens, chains

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        model = os.path.join(folder.name, "chain.gguf")
        serve_tools.write_model(model, *self.model_of)
        self.server = Server("--device", "cpu", "--slots", "1", "--pool", "2048", "--retention", "none", model=model)
        self.browser = chromium()
        self.addCleanup(self.browser.quit)
        self.browser.get(f"http://127.0.0.1:{self.server.port}/")
        self.wait(lambda: "bytes" in self.find("#bytes").text)

    def tearDown(self):
        self.assertEqual([entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"], [])
        self.browser.get("about:blank")
        self.assertEqual(self.server.stop()[0], 0)

    def wait(self, condition):
        try:
            return WebDriverWait(self.browser, PATIENCE, poll_frequency=0.1).until(lambda _: condition())
        except TimeoutException:
            raise AssertionError("the page never came to that: " + self.find("body").text) from None

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def answer(self, number):
        """The answer with this number, when it is whole."""
        self.wait(lambda: len(self.all("article.answer[aria-busy=false]")) == number and self.find("#send").is_displayed())
        return self.all("article.answer")[-1]

    def ask(self, question, number):
        self.find("#question").send_keys(question, Keys.ENTER)
        return self.answer(number)

    def read(self):
        """The text that the slot holds."""
        return "".join(segment["text"] for segment in self.server.get("/thimble/kept?slot=0")["segments"])


class Thinker(Chain):
    model_of = serve_tools.Thoughts.model_of

    def answer_below_thoughts(self, question, number):
        article = self.ask(question, number)
        details = article.find_element(By.CSS_SELECTOR, "details.thoughts")
        self.assertFalse(details.get_attribute("open"))
        self.assertIn("Maybe", details.get_attribute("textContent"))
        text = article.find_element(By.CSS_SELECTOR, ".text")
        self.assertLess(details.location["y"], text.location["y"])
        self.assertEqual(self.all(".end"), [])
        return text.text

    def test_thoughts_are_folded_above_the_answer(self):
        # Without tools a call is text.
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        self.assertEqual(self.answer_below_thoughts("What is 1 + 2?", 1), call)
        # The form that is asked for begins after the thoughts.
        self.find("#form summary").click()
        self.find("#schema").send_keys(json.dumps(serve_tools.NUMBERS))
        self.assertEqual(json.loads(self.answer_below_thoughts("And 3 + 4?", 2)), serve_tools.MEANT)


class OnlyThinker(Chain):
    model_of = (serve_tools.THINKER, serve_tools.MARKS, [["<think>", "Maybe it is 3.", "</think>", "<|end|>"]])

    def test_thoughts_without_an_answer_are_shown(self):
        for number in (1, 2):
            article = self.ask("What is 1 + 2?", number)
            details = article.find_element(By.CSS_SELECTOR, "details.thoughts")
            self.assertFalse(details.get_attribute("open"))
            self.assertIn("Maybe it is 3.", details.get_attribute("textContent"))
            self.assertFalse(article.find_element(By.CSS_SELECTOR, ".text").is_displayed())
            self.assertEqual(article.find_element(By.CSS_SELECTOR, ".end").text, "The model ended without an answer.")
            self.assertEqual(self.find("#question").get_attribute("value"), "")
        self.assertEqual(self.read().count("<|user|>What is 1 + 2?"), 2)


class Errors(Chain):
    model_of = (serve_tools.TEMPLATE, serve_tools.SPECIAL, [["<|assistant|>", "It is 3.", "<|end|>"]])

    def test_an_error_is_seen_however_long_the_conversation_is(self):
        for number in range(1, 13):
            self.ask("What is 1 + 2?", number)
        self.browser.execute_script("find('offer').open = true")
        self.find("#tools").send_keys("[{]")
        for width, height in ((1280, 600), (400, 800)):
            self.browser.set_window_size(width, height)
            for place in ("0", "e.scrollHeight"):
                self.find("#question").send_keys("So?", Keys.ENTER)
                self.wait(lambda: self.find("#problem").text.startswith("The tools must be"))
                scroll = f"for (const e of [find('chat'), document.documentElement]) e.scrollTo(0, {place})"
                self.browser.execute_script(scroll)
                # What a person sees in the middle of the line is the line.
                seen = self.browser.execute_script("""
                    const box = find("problem").getBoundingClientRect();
                    return document.elementFromPoint(box.x + 20, box.y + box.height / 2)?.id ?? null;""")
                self.assertEqual(seen, "problem", (width, place))
                self.find("#question").clear()
            if width > 1000:  # only the two columns can be scrolled
                extra = self.browser.execute_script("const e = document.documentElement; return e.scrollHeight - e.clientHeight")
                self.assertEqual(extra, 0)
        # Without an error the line takes no room.
        self.find("#tools").clear()
        height = "return find('problem').getBoundingClientRect().height"
        self.ask("So?", 13)
        self.assertEqual(self.browser.execute_script(height), 0)


class Caller(Chain):
    # 2 calls with a long integer and an empty list, and then an answer.
    CALLS = ('<tool_call>{"name": "add", "arguments": {"a": 12345678901234567890, "b": []}}</tool_call>'
             '<tool_call>{"name": "say", "arguments": {"text": "a, {b}"}}</tool_call>')
    model_of = (serve_tools.TEMPLATE, serve_tools.SPECIAL,
                [["<|assistant|>", CALLS, "<|end|>"], ["<|result|>", "It is 3.", "<|end|>"]])

    def test_calls_are_shown_and_their_results_continue_the_conversation(self):
        self.browser.set_window_size(1280, 800)
        self.find("#offer summary").click()
        tools, question = self.find("#tools"), self.find("#question")
        for wrong in ('{"name": "add"}', "[{]", '["add"]', "[null]", '[{"function": {}}]'):
            tools.clear()
            tools.send_keys(wrong)
            question.send_keys("What is 1 + 2?", Keys.ENTER)
            self.wait(lambda: self.find("#problem").text == 'The tools must be a JSON list of functions, each with a "name".')
            self.wait(lambda: self.find("#send").is_displayed())
            self.assertEqual(question.get_attribute("value"), "What is 1 + 2?")
            self.assertEqual(self.all("article"), [])
            question.clear()
        # Nothing was sent.
        self.assertIsNone(self.server.get("/thimble/state")["last"])
        tools.clear()
        tools.send_keys(json.dumps([{"name": "add", "parameters": serve_tools.SCHEMA}, {"type": "function", "function": {"name": "say"}}]))
        article = self.ask("What is 1 + 2?", 1)
        self.assertFalse(article.find_element(By.CSS_SELECTOR, ".text").is_displayed())
        self.assertEqual([title.text for title in article.find_elements(By.CSS_SELECTOR, "strong")], ["Call of add", "Call of say"])
        self.assertEqual([call.get_attribute("textContent") for call in article.find_elements(By.CSS_SELECTOR, "pre")],
                         ['{\n  "a": 12345678901234567890,\n  "b": []\n}', '{\n  "text": "a, {b}"\n}'])
        # The results come before another question.
        question.send_keys("And 3 + 4?", Keys.ENTER)
        self.assertEqual(self.find("#problem").text, "Send the results of the calls first, or start over.")
        question.clear()
        for field, name, result in zip(article.find_elements(By.CSS_SELECTOR, "textarea"), ("add", "say"), ("3 <b>", "said")):
            self.assertEqual(self.find(f"label[for={field.get_attribute('id')}]").text, "Result of " + name)
            field.send_keys(result)
        if "PAGE_SCREENSHOTS" in os.environ:
            self.browser.save_screenshot(os.environ["PAGE_SCREENSHOTS"] + "/calls.png")
        article.find_element(By.CSS_SELECTOR, "button").click()
        self.assertEqual(self.answer(2).find_element(By.CSS_SELECTOR, ".text").text, "It is 3.")
        self.assertFalse(article.find_element(By.CSS_SELECTOR, "button").is_displayed())
        self.assertEqual(article.find_element(By.CSS_SELECTOR, "textarea").get_attribute("value"), "3 <b>")
        self.assertIn('<|assistant|><tool_call>{"name": "add"', self.read())
        self.assertIn("<|tool|>3 <b><|end|><|tool|>said<|end|><|result|>It is 3.", self.read())
        self.ask("And 3 + 4?", 3)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
