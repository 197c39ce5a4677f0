"""The page at / in Debian's Chromium: real keys and clicks, on the daemon with the bundled model.

KEEPD_SCREENSHOTS names a folder for pictures at 1280 and 390 pixels, light and dark (docs/page*.png, with 64 colours)."""
import base64
import json
import os
import pathlib
import shutil
import sys

import pytest
import requests

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SECONDS = 60
SMALL, LARGE = 14, 48  # places of the budget's slider: 54 and 1,024 entries
TALK = ("My sister Nora lives in Lisbon. The code of the garage is 4815.",
        "Our dog is called Rex and likes the park near the river. Yesterday we walked there for two hours and met the "
        "neighbours, who told us about the new bakery at the corner.",
        "In the evening my brother Paul called from Oslo; he has a new bicycle and wants to ride to the coast with his "
        "friend Ines in June. They will take the train back.",
        "The weather was cold and it rained until noon. Then the sun came out and we had lunch in the garden with soup, "
        "bread and cheese from the market.")
QUESTION = "What is the code of the garage?"
# Requests for answers stay without one until they are aborted.
HOLD = ("window.fetch = (fetch => (path, init) => path.includes('chat') ? new Promise((_, fail) => init.signal"
        ".addEventListener('abort', () => fail(new Error('aborted')))) : fetch(path, init))(window.fetch)")
# Keeps what is asked for, in window.asked.
RECORD = ("window.asked = []; window.fetch = (fetch => (path, init) => { if (path.includes('chat')) window.asked.push("
          "JSON.parse(init.body)); return fetch(path, init); })(window.fetch)")
# Long answers, whose events pass one by one up to the fifth token behind the first report of the heads; the rest
# waits for release(). Every event that passed is in window.passed, under the policy of its request.
GATE = """
window.passed = {}; window.opened = new Promise(open => { window.release = open; });
window.fetch = (fetch => async (path, init) => {
  if (!path.includes('chat')) return fetch(path, init);
  const body = {...JSON.parse(init.body), ignore_eos: true, max_tokens: 1500};
  const answer = await fetch(path, {...init, body: JSON.stringify(body)});
  const events = window.passed[body.kv.policy] = [];
  let rest = '', tokens = -1;
  const gate = new TransformStream({async transform(text, to) {
    const parts = (rest + text).split('\\n\\n');
    rest = parts.pop();
    for (const part of parts) {
      if (tokens >= 5) await window.opened;
      const event = part.startsWith('data: {') ? JSON.parse(part.slice(6)) : {};
      if (event.kv_progress) tokens = Math.max(tokens, 0);
      if (tokens >= 0 && event.choices?.length) tokens++;
      events.push(event);
      to.enqueue(part + '\\n\\n');
    }
  }});
  return new Response(answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(gate).pipeThrough(new TextEncoderStream()));
})(window.fetch);
"""


class Page:
    def __init__(self, url, downloads):
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        # --no-sandbox: Chromium refuses to run as root with its sandbox
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(flag)
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.show(1280, 800)
        self.driver.get(url + "/")

    def show(self, width, height, dark=False):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def wait(self, condition):
        """The page may replace an element between its finding and its reading."""
        ignored = [StaleElementReferenceException]
        return WebDriverWait(self.driver, SECONDS, ignored_exceptions=ignored).until(lambda _: condition())

    def ready(self):
        self.wait(lambda: self.one("#model").text == "keepd-nano")

    def budget(self, place, which=""):
        """By keyboard, as a person moves a slider."""
        slider = self.one(f"#budget{which}")
        slider.send_keys(Keys.HOME + Keys.ARROW_RIGHT * place)
        assert slider.get_property("value") == str(place)

    def send(self, text):
        """The answers to it, once they are complete."""
        before = len(self.all(".answer"))
        self.one("#input").send_keys(text, Keys.ENTER)
        self.wait(lambda: len(self.all(".answer")) > before and self.one("#send").is_displayed())
        assert not self.all(".answer .error"), self.one(".answer .error").text
        return [answer.text for answer in self.all(".answer")[before:]]

    def press(self, label):
        """The last button with this label."""
        [button for button in self.all("button") if button.text == label][-1].click()

    def answer_dialog(self, text=None):
        self.wait(lambda: self.one("#dialog").is_displayed())
        if text is not None:
            self.one("#reply").clear()
            self.one("#reply").send_keys(text)
        self.one("#agree").click()

    def names(self):
        return [button.text for button in self.all("#chats button")]

    def entries(self):
        """By head, as the map says it."""
        return self.driver.execute_script("return [...document.querySelectorAll('#map button')].map(cell => cell.title)")

    def picture(self, name):
        if folder := os.environ.get("KEEPD_SCREENSHOTS"):
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(f"{folder}/{name}.png")


@pytest.fixture
def visit(daemon, tmp_path):
    """visit("--flag") starts a daemon and opens its page. The browser's console may only have refused requests."""
    if not BROWSER or not DRIVER:
        pytest.skip("skip: Debian's chromium and chromium-driver are not installed")
    pages = []

    def open_page(*flags):
        running = daemon(*flags)
        pages.append(Page(running.url, tmp_path))
        return pages[-1]

    yield open_page
    for page in pages:
        messages = [entry["message"] for entry in page.driver.get_log("browser") if "a status of 40" not in entry["message"]]
        page.driver.quit()
        assert messages == []


def test_a_dialogue_and_what_is_kept_of_it(visit):
    page = visit()
    page.ready()
    for text in TALK:
        page.send(text)
    assert "100 % of the full cache" in page.one("#summary").text
    page.budget(SMALL)
    page.one("#compare").click()
    Select(page.one("#policy-b")).select_by_visible_text("streaming")
    page.budget(SMALL, "-b")
    kept, lost = page.send(QUESTION)
    assert "4815" in kept and "4815" not in lost
    assert len(page.all("#map button")) == 6 * 4
    fills = {cell.get_attribute("title").split(": ")[1] for cell in page.all("#map button")}
    assert len(fills) > 3  # heads keep different numbers of entries
    # the code is still held, words around it are not
    assert page.all("#held .k0")
    next(token for token in page.all("#held span") if token.text.strip() == "code").click()
    assert page.one("#token-text").text.startswith("Token ") and "held by 0 of" not in page.one("#token-text").text
    held = int(page.one("#token-text").text.rsplit("held by ", 1)[1].split()[0])
    assert len(page.all("#map .holds")) == held > 0
    page.picture("page")
    for width, height in ((1280, 800), (390, 844)):
        for dark in (False, True):
            page.show(width, height, dark)
            page.picture(f"page-{width}-{'dark' if dark else 'light'}")
    page.one("nav [data-tab=memory]").click()
    assert page.one("#map").is_displayed() and not page.one("#log").is_displayed()
    page.picture("page-390-dark-memory")
    page.show(1280, 800)
    # one head alone, then the text as it was held earlier
    page.all("#map button")[5].click()
    assert "layer 1, head 1" in page.one("#held-title").text
    dropped = len(page.all("#held .k0"))
    page.all("#map button")[5].click()
    assert len(page.all("#held .k0")) < dropped
    page.one("#time").send_keys(Keys.HOME)
    assert page.one("#time-text").text.startswith("1 of ")
    assert sum(token.is_displayed() for token in page.all("#held span")) == 1
    # the other answer's memory, and continuing from it
    page.press("Show memory")
    assert page.one("#summary").text.startswith("streaming")
    page.press("Continue from this")
    assert [b.text for b in page.all(".answer button")].count("Continues from this") == 1


def test_conversations_are_kept_named_forked_exported_and_deleted(visit, tmp_path):
    page = visit()
    page.ready()
    page.send(TALK[0])
    page.send(TALK[1])
    page.press("Rename")
    page.answer_dialog("The garage")
    page.wait(lambda: page.names() == ["The garage"])
    page.all(".answer")[0].find_element(By.XPATH, ".//button[text()='Fork']").click()
    page.wait(lambda: page.names() == ["The garage (fork)", "The garage"])
    assert len(page.all(".answer")) == 1
    answer, = page.send(QUESTION)
    assert "4815" in answer and "reused" in answer  # the server continues the common beginning
    page.press("Export")
    page.wait(lambda: (tmp_path / "conversation.json").exists())
    exported = json.loads((tmp_path / "conversation.json").read_text())
    assert [m["role"] for m in exported["messages"]] == ["user", "assistant"] * 2
    page.driver.refresh()
    page.ready()
    page.wait(lambda: page.names() == ["The garage (fork)", "The garage"])
    assert len(page.all(".answer")) == 2
    page.press("Delete")
    page.answer_dialog()
    page.wait(lambda: page.names() == ["The garage"])
    page.press("New")
    assert len(page.names()) == 2 and not page.all(".answer")


def test_behind_a_key(visit, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    keys.chmod(0o600)
    page = visit("--api-key-file", str(keys))
    page.answer_dialog("wrong")
    page.wait(lambda: page.one("#reply").get_property("value") == "" and page.one("#dialog").is_displayed())
    page.answer_dialog("the-key")
    page.ready()
    assert "4815" in page.send(TALK[0] + " " + QUESTION)[0]
    stored = page.driver.execute_script("return [sessionStorage, localStorage].map(store => JSON.stringify(store))")
    assert "the-key" in stored[0] and "the-key" not in stored[1]


def test_errors_are_shown_and_a_request_is_stopped(visit):
    page = visit("--default-max-tokens", "4000")
    page.ready()
    page.one("#more summary").click()
    page.one("#tools").send_keys("{not a list")
    page.one("#input").send_keys("hello", Keys.ENTER)
    page.wait(lambda: page.one("#status").text.startswith("Tools: "))
    page.one("#tools").clear()
    page.one("#tokens").send_keys("999999")
    page.one("#input").send_keys("hello", Keys.ENTER)
    page.wait(lambda: page.all(".answer .error"))
    assert "Invalid value for 'max_tokens'" in page.one(".answer .error").text
    page.press("New")
    page.one("#tokens").clear()
    page.driver.execute_script(HOLD)
    page.one("#input").send_keys("hello", Keys.ENTER)
    page.wait(lambda: page.one("#stop").is_displayed())
    page.one("#stop").click()
    page.wait(lambda: page.all(".answer .error") and page.one(".answer .error").text == "Stopped.")
    assert page.one("#send").is_displayed()


def test_an_answer_in_progress_is_left(visit):
    """The answer is not shown in another conversation. Later it has the text that had arrived."""
    page = visit()
    page.ready()
    page.send(TALK[0])
    page.driver.execute_script(HOLD)
    page.one("#input").send_keys("hello", Keys.ENTER)
    page.wait(lambda: page.one("#stop").is_displayed())
    page.press("New")
    page.wait(lambda: page.one("#send").is_displayed())
    assert not page.all(".answer") and not page.one("#memory").is_displayed()
    page.driver.refresh()
    page.ready()
    page.all("#chats button")[1].click()
    page.wait(lambda: len(page.all(".answer")) == 2)
    assert [button.text for button in page.all(".answer:last-child button")].count("Fork") == 2


def entries_now(events):
    """The map's titles: the newest report, and one entry more in every head for each token after it. The last
    token is in no head yet. A report may be ahead of the tokens that have arrived."""
    held = [e["kv_progress"] for e in events if "kv_progress" in e][-1]
    total = [e["prompt_progress"]["total"] for e in events if "prompt_progress" in e][-1]
    tokens = sum(len(c["logprobs"]["content"]) for e in events for c in e.get("choices", []) if c.get("logprobs"))
    later = max(0, total + tokens - 1 - held["seen_tokens"])
    return titles([[length + later for length in layer] for layer in held["lengths"]])


def titles(lengths):
    return [f"layer {layer}, head {head}: {length:,} entries"
            for layer, heads in enumerate(lengths) for head, length in enumerate(heads)]


def test_the_map_moves_while_answers_run(visit):
    page = visit()
    page.ready()
    page.send(TALK[1])
    page.budget(SMALL)
    page.one("#compare").click()
    Select(page.one("#policy-b")).select_by_visible_text("streaming")
    page.budget(SMALL, "-b")
    page.driver.execute_script(GATE)
    page.one("#input").send_keys(QUESTION, Keys.ENTER)

    def passed(policy):
        return page.driver.execute_script("return window.passed[arguments[0]] ?? []", policy)

    def at_gate(policy):
        events = passed(policy)
        return any("kv_progress" in e for e in events) and page.entries() == entries_now(events)

    page.wait(lambda: at_gate("global"))
    assert "and it runs" in page.one("#summary").text and page.one("#stop").is_displayed()
    assert not page.all("#held span") and not page.one("#legend").is_displayed()
    before = page.entries()
    first, second = page.all("#which button")
    assert first.get_attribute("aria-pressed") == "true"
    second.click()
    assert page.one("#summary").text.startswith("streaming")
    page.wait(lambda: at_gate("streaming"))
    page.all("#map button")[5].click()  # stays chosen to the end
    page.picture("page-live")
    page.driver.execute_script("window.release()")
    page.wait(lambda: page.one("#send").is_displayed())
    usage = [e["usage"]["kv_details"] for e in passed("streaming") if e.get("usage")][-1]
    assert page.entries() == titles(usage["lengths"])
    assert "layer 1, head 1" in page.one("#held-title").text and page.all("#held span")
    page.all("#which button")[0].click()
    assert page.entries() != before and page.one("#summary").text.startswith("global")


def test_the_numbers_move_while_answers_run(visit):
    page = visit("--default-max-tokens", "8000")
    page.ready()
    assert page.one("#running").text == "0"
    # nobody reads the answers: they end when the connection does
    body = {"model": "keepd-nano", "messages": [{"role": "user", "content": "hello"}], "stream": True, "n": 8,
            "max_tokens": 8000, "ignore_eos": True}
    url = page.driver.current_url.rstrip("/") + "/v1/chat/completions"
    with requests.post(url, json=body, stream=True, timeout=60) as answer:
        assert answer.status_code == 200
        page.wait(lambda: page.one("#running").text == "8" and page.one("#rate").text != "0")
        assert page.one("#pool").get_attribute("aria-label") != "0 % of the cache in use"
    page.wait(lambda: page.one("#running").text == "0" and page.one("#rate").text == "0")


def test_reasoning_and_calls_are_folded(visit, tmp_path, monkeypatch):
    """On the fake engine, whose answers are told. What the user opens stays open while the answer goes on."""
    fake = next(iter(sorted((ROOT / "build").glob("*/server/keepd-fake"))), None)
    if not fake:
        pytest.skip("skip: keepd-fake is not built")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    script = tmp_path / "script.json"
    script.write_text(json.dumps([["It rains.", "Take an umbrella."], ["weather", "\x01I ask the tool.\x02" + call]]))
    for name, value in (("KEEPD_BIN", fake), ("KEEPD_FAKE_SCRIPT", script), ("KEEPD_FAKE_THINK", 1), ("KEEPD_FAKE_TOOLS", "hermes")):
        monkeypatch.setenv(name, str(value))
    page = visit()
    page.ready()
    page.one("#more summary").click()
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    page.one("#tools").send_keys(json.dumps([tool]))
    page.send("How is the weather in Oslo?")
    folds = page.all(".answer details")
    assert [fold.find_element(By.CSS_SELECTOR, "summary").text for fold in folds] == ["Reasoning", "Call of weather"]
    assert not any(fold.get_attribute("open") for fold in folds)
    assert "I ask the tool." not in page.one(".answer").text and "Oslo" not in page.one(".answer").text
    for fold in folds:
        fold.find_element(By.CSS_SELECTOR, "summary").click()
    assert "I ask the tool." in page.one(".answer").text and '"Oslo"' in page.one(".answer").text
    # the next message is the call's result; what is open stays open
    assert "umbrella" in page.send("It rains.")[0]
    assert [who.text for who in page.all(".who")][2] == "Result of the call"
    assert [bool(fold.get_attribute("open")) for fold in page.all(".answer")[0].find_elements(By.TAG_NAME, "details")] == [True] * 2


def test_policy_budget_and_seed_are_those_of_each_message(visit):
    page = visit()
    page.ready()
    page.driver.execute_script(RECORD)
    page.one("#more summary").click()
    page.one("#temperature").send_keys("1.5")
    page.one("#tokens").send_keys("40")
    answers = []
    for seed, policy, place in (("7", "global", SMALL), ("7", "global", SMALL), ("8", "streaming", LARGE)):
        page.press("New")
        page.one("#seed").clear()
        page.one("#seed").send_keys(seed)
        Select(page.one("#policy")).select_by_visible_text(policy)
        page.budget(place)
        page.send(TALK[0])
        answers.append(page.all(".answer .text")[-1].text)
    assert answers[0] == answers[1]
    page.one("#seed").clear()
    page.send(QUESTION)
    asked = page.driver.execute_script("return window.asked.map(body => [body.seed ?? null, body.kv.policy, body.kv.budget])")
    assert asked == [[7, "global", 54], [7, "global", 54], [8, "streaming", 1024], [None, "streaming", 1024]]


def test_by_keyboard_alone(visit):
    page = visit()
    page.ready()

    def active():
        return page.driver.switch_to.active_element

    def tab_to(selector):
        for _ in range(60):
            if page.driver.execute_script("return document.activeElement.matches(arguments[0])", selector):
                return
            active().send_keys(Keys.TAB)
        raise AssertionError(f"Tab does not reach {selector}")

    tab_to("#input")
    active().send_keys(TALK[0], Keys.ENTER)
    page.wait(lambda: page.all("#held span") and page.one("#send").is_displayed())
    tab_to("#map button")
    for key, head in ((Keys.ARROW_RIGHT, "layer 0, head 1"), (Keys.ARROW_DOWN, "layer 1, head 1"), (Keys.ARROW_LEFT, "layer 1, head 0")):
        active().send_keys(key)
        assert active().get_attribute("aria-label").startswith(head)
    active().send_keys(Keys.ENTER)
    assert "layer 1, head 0" in page.one("#held-title").text
    tab_to("#held")
    for key, token in ((Keys.ARROW_RIGHT, "Token 0 "), (Keys.ARROW_DOWN, "Token 10 "), (Keys.ARROW_LEFT, "Token 9 ")):
        active().send_keys(key)
        assert page.one("#token-text").text.startswith(token)
    # Escape ends an answer, and the focus is where the next message is written
    page.driver.execute_script(HOLD)
    tab_to("#input")
    active().send_keys("hello", Keys.ENTER)
    page.wait(lambda: page.one("#stop").is_displayed())
    active().send_keys(Keys.ESCAPE)
    page.wait(lambda: page.all(".answer .error"))
    assert active().get_attribute("id") == "input"
    # a button and a dialog: Enter opens it, Escape leaves it
    tab_to("#rename")
    active().send_keys(Keys.ENTER)
    page.wait(lambda: page.one("#dialog").is_displayed())
    assert active().get_attribute("id") == "reply"
    active().send_keys("By keys", Keys.ENTER)
    page.wait(lambda: page.names()[0].endswith("By keys"))


# Drops a file of these bytes, in base64, on the chat.
DROP = """
const [bytes, name, type] = arguments, transfer = new DataTransfer();
transfer.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, {type}));
for (const kind of ['dragover', 'drop'])
  document.getElementById('input').dispatchEvent(new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true}));
"""
# Each square: where it lies over its picture, in percent, and its class.
PATCHES = ("return [...document.querySelectorAll('#held figure')].map(f => [...f.querySelectorAll('span')].map(s => "
           "[s.style.left, s.style.top, s.style.width, s.style.height, s.className]))")


def test_a_picture_and_what_is_kept_of_it(visit, tmp_path):
    pytest.importorskip("numpy")
    sys.path.insert(0, str(ROOT / "tests/python"))
    from vision_model import EDGE, write_model
    from test_pictures import picture, png
    file = tmp_path / "picture.png"
    file.write_bytes(png(picture(1)))
    page = visit("--model", str(write_model(tmp_path / "eyes", longest=2 * EDGE)), "--kv-policy", "streaming")
    page.wait(lambda: page.one("#model").text)
    page.driver.execute_script(DROP, base64.b64encode(b"text").decode(), "words.txt", "text/plain")
    page.wait(lambda: page.one("#status").text == "words.txt is no picture.")
    page.one("#file").send_keys(str(file))
    page.wait(lambda: len(page.all("#attached img")) == 1)
    page.driver.execute_script(DROP, base64.b64encode(file.read_bytes()).decode(), "b.png", "image/png")
    page.wait(lambda: len(page.all("#attached img")) == 2)
    two = "(function() {" + DROP + "})(...arguments);"
    page.driver.execute_script(two * 2, base64.b64encode(file.read_bytes()).decode(), "c.png", "image/png")  # read at the same time
    page.wait(lambda: len(page.all("#attached img")) == 4)
    for _ in range(3):
        page.all("#attached button")[0].click()
    assert len(page.all("#attached img")) == 1
    page.driver.execute_script("document.getElementById('tokens').value = 8")
    page.driver.execute_script("document.getElementById('temperature').value = 0")  # a drawn answer may end before an eviction
    page.budget(SMALL)
    page.send("What is it?")
    assert not page.all("#attached img") and len(page.all(".user img")) == 1
    side = EDGE // 8
    divided, whole = page.driver.execute_script(PATCHES)
    assert len(divided) == 2 * side * side and len(whole) == side * side
    lefts = {round(float(patch[0][:-1]), 3) for patch in divided}
    assert lefts == {round(50 * i / side, 3) for i in range(2 * side)}
    shades = {patch[4] for patch in divided + whole}
    assert "k0" in shades and len(shades) > 1  # some squares are gone, others are held
    page.picture("page-picture")
    page.all("#held figure span")[-1].click()
    assert f"picture 1, row {side}, column {side}" in page.one("#token-text").text
    page.one("#time").send_keys(Keys.HOME)
    assert all("late" in patch[4] for patch in page.driver.execute_script(PATCHES)[1])
    page.driver.refresh()
    page.wait(lambda: page.one("#model").text and len(page.all(".user img")) == 1)
    page.driver.execute_script("document.getElementById('tokens').value = 8")
    page.send("And now?")
    assert len(page.all("#held figure")) == 2  # the picture is part of the conversation
    page.driver.execute_script(DROP, base64.b64encode(b"text").decode(), "damaged.png", "image/png")
    page.wait(lambda: len(page.all("#attached img")) == 1)
    page.one("#input").send_keys("And this?", Keys.ENTER)
    page.wait(lambda: page.all(".answer .error"))
    assert "this is no picture" in page.one(".answer .error").text
    page.one("#input").send_keys("So?", Keys.ENTER)
    page.wait(lambda: len(page.all(".answer")) == 4 and page.one("#send").is_displayed())
    assert len(page.all(".answer .error")) == 1  # the damaged picture is not sent again


def test_a_model_without_eyes_takes_no_pictures(visit):
    page = visit()
    page.ready()
    assert not page.one("#picture").is_displayed()
    page.driver.execute_script(DROP, base64.b64encode(b"x").decode(), "a.png", "image/png")
    page.wait(lambda: page.one("#status").text == "This model sees no pictures.")
