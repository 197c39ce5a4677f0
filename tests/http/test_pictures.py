"""Pictures in requests. The fake's template writes of each picture what the server made of it, so that answers show it."""
import base64
import concurrent.futures
import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import threading
import time
import zlib

import pytest

from conftest import FAKE, Daemon, find_built

MODEL = pathlib.Path(__file__).resolve().parents[2] / "bundled/keepd-nano"
CORPUS = pathlib.Path(__file__).resolve().parents[1] / "fuzz/corpus/picture"
WHOLE = "messages[0].content[0].image_url.url"
NOISE = bytes((i * 7 + i // 3) & 255 for i in range(4096))


def png(width, height, level=0):
    rows = b"".join(b"\0" + NOISE[y:y + 3 * width].ljust(3 * width, b"\1") for y in range(height))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows, level)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
                                           for name, data in chunks)


def address(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data, **more):
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else address(data), **more}}


def user(*parts):
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


@pytest.fixture(scope="module")
def seeing():
    if not FAKE:
        pytest.skip("leans on the fake engine's answers")
    daemon = Daemon(env={"KEEPD_FAKE_PICTURES": "1"})
    yield daemon
    assert daemon.stop() == 0


def seen(daemon, *parts, **fields):
    r = daemon.chat(messages=user(*parts), temperature=0, **fields)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["message"]["content"]


def test_a_picture_stands_in_its_place(seeing):
    text = seen(seeing, "left", part(png(40, 20)), "right", part(png(20, 40)), max_tokens=200)
    assert re.fullmatch(r"left\[40x20, 1x2, [0-9a-f]{8}\]right\[20x40, 2x1, [0-9a-f]{8}\]", text)


def test_equal_pixels_have_one_digest(seeing):
    """However the file is written, and in whichever form a client sends it."""
    data = png(30, 30)
    forms = [part(data), part(png(30, 30, level=9)), {"type": "input_image", "image_url": address(data)}, {"type": "image_url", "image_url": address(data)},
             {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}},
             part(address(data).replace("+", "%2B").replace("/", "%2f").replace("data:image%2fpng", "data:image/png")),
             part("data:image/png;base64," + base64.urlsafe_b64encode(data).decode().rstrip("=")),
             part(address(data, "image/jpeg")), part(address(data, "application/octet-stream"))]
    texts = {seen(seeing, form, max_tokens=100) for form in forms}
    assert len(texts) == 1, texts
    assert seen(seeing, part(png(31, 30)), max_tokens=100) not in texts


def test_the_first_frame_of_a_gif(seeing):
    frame = b",\0\0\0\0\2\0\1\0\0\2\2\x44\x0a\0"
    head = b"GIF89a\2\0\1\0\x80\0\0\0\0\0\xff\xff\xff"
    text = seen(seeing, part(address(head + frame * 3 + b";", "image/gif")), max_tokens=100)
    assert text.startswith("[2x1, ") and text == seen(seeing, part(head + frame), max_tokens=100)


def test_detail(seeing):
    assert "0x0" in seen(seeing, part(png(30, 30), detail="low"), max_tokens=100)
    for detail in ("high", "auto", "original"):
        assert "2x2" in seen(seeing, part(png(30, 30), detail=detail), max_tokens=100)


def test_a_picture_in_a_result(seeing):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}
    messages = [*user("look"), call, {"role": "tool", "tool_call_id": "1", "content": user("got", part(png(8, 8)))[0]["content"]}]
    text = seeing.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert re.search(r"got\[8x8, 2x2, ", text)


def block(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}}


def test_pictures_of_messages(seeing):
    """Anthropic's blocks, also in the result of a tool."""
    body = {"model": "tiny", "max_tokens": 200, "temperature": 0}
    content = [{"type": "text", "text": "left"}, block(png(40, 20)), block(png(20, 40)), {"type": "text", "text": "right"}]
    text = seeing.post("/v1/messages", {**body, "messages": [{"role": "user", "content": content}]}).json()["content"][0]["text"]
    assert re.fullmatch(r"left\[40x20, .*?\]\[20x40, .*?\]right", text)
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, block(png(8, 8)),
                                                                       {"type": "text", "text": "c"}]}
    messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    counted = seeing.post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages})
    assert counted.status_code == 200, counted.text
    shorter = [*messages[:2], {"role": "user", "content": [{**result, "content": "a\nbc"}]}]
    fewer = seeing.post("/v1/messages/count_tokens", {"model": "tiny", "messages": shorter}).json()["input_tokens"]
    assert counted.json()["input_tokens"] == fewer + len("[8x8, 2x2, 01234567]")


def test_pictures_of_responses(seeing):
    content = [{"type": "input_text", "text": "left"}, {"type": "input_image", "image_url": address(png(40, 20)), "detail": "low"}]
    r = seeing.post("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 200})
    assert r.status_code == 200, r.text
    text = r.json()["output"][-1]["content"][0]["text"]
    assert re.fullmatch(r"left\[40x20, 0x0, .*?\]", text)
    again = {"model": "tiny", "previous_response_id": r.json()["id"], "input": "and?", "max_output_tokens": 5}
    assert seeing.post("/v1/responses", again).status_code == 200


@pytest.mark.parametrize("path,field,body", [
    ("/v1/messages", "messages[0].content[1].source.data", {"messages": user("a", block(b"hello"))}),
    ("/v1/messages", "messages[0].content[0].source.type", {"messages": user({"type": "image", "source": {"type": "file", "file_id": "x"}})}),
    ("/v1/responses", "input[0].content[1].image_url", {"input": user("a", {"type": "input_image", "image_url": address(b"hello")})}),
    ("/v1/responses", "input[0].content[0].image_url", {"input": user({"type": "input_image", "file_id": "x"})})])
def test_refused_pictures_of_other_forms(seeing, path, field, body):
    r = seeing.post(path, {"model": "tiny", "max_tokens": 5, **body} if "messages" in body else {"model": "tiny", **body})
    assert r.status_code == 400 and field in r.text, r.text


@pytest.mark.parametrize("field,why,message", [
    (WHOLE, "--allow-image-urls", user(part("https://example.com/a.png"))),
    (WHOLE, "--allow-image-urls", user(part("HTTP://127.0.0.1/a.png"))),
    (WHOLE, "expected data:", user(part("file:///etc/passwd"))),
    (WHOLE, "expected data:", user(part(""))),
    (WHOLE, "in base64", user(part("data:image/png,abc"))),
    (WHOLE, "not in base64", user(part("data:image/png;base64,!!!!"))),
    (WHOLE, "not in base64", user(part("data:image/png;base64,A"))),
    (WHOLE, "not in base64", user(part("data:image/png;base64,AAAA%2"))),
    (WHOLE, "no picture", user(part("data:image/png;base64,"))),
    (WHOLE, "no picture", user(part(b"hello"))),
    (WHOLE, "GIF file is damaged", user(part(b"GIF89a\1\0\1\0"))),
    (WHOLE, "BMP files are not read", user(part(b"BM\1\0\1\0"))),
    (WHOLE, "ends early", user(part(png(9, 9)[:-20]))),
    (WHOLE, "damaged", user(part(png(9, 9).replace(b"IDAT", b"IDAX")))),
    ("messages[0].content[1].image_url.url", "no picture", user("a", part(b"hello"))),
    (WHOLE, "a string", user({"type": "image_url", "image_url": {"url": 5}})),
    (WHOLE, "Missing", user({"type": "image_url", "image_url": {}})),
    ("messages[0].content[0].image_url", "Missing", user({"type": "image_url"})),
    ("messages[0].content[0].image_url.detail", "'low'", user(part(png(9, 9), detail="tiny"))),
    ("messages[0].content[0].image_url.detail", "a string", user(part(png(9, 9), detail=1))),
    ("messages[0].content[0].source.type", "base64", user({"type": "image", "source": {"type": "url", "url": "https://a"}})),
    ("messages[0].content[0].source", "Missing", user({"type": "image"})),
    ("messages[0].content[0].type", "a message of the user", [{**user(part(png(9, 9)))[0], "role": "system"}]),
    ("truncate_prompt_tokens", "pictures", user(part(png(9, 9)))),
    ("prompt_logprobs", "has no scores", user(part(png(9, 9)))),
])
def test_refused_pictures(seeing, field, why, message):
    other = {field: 5} if field in ("truncate_prompt_tokens", "prompt_logprobs") else {}
    r = seeing.chat(messages=message, max_tokens=5, **other)
    assert r.status_code == 400, r.text
    assert r.json()["error"]["param"] == field and why in r.json()["error"]["message"], r.text


def images(*files):
    return [base64.b64encode(file).decode() for file in files]


def test_images_of_ollama(seeing):
    """Pictures stand in front of the text, also in a tool's result."""
    options = {"stream": False, "options": {"temperature": 0, "num_predict": 200}}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "text", "images": images(png(40, 20), png(20, 40))}]
    r = seeing.post("/api/chat", {"messages": messages, **options})
    assert re.fullmatch(r"\[40x20, 1x2, .*?\]\[20x40, 2x1, .*?\]text", r.json()["message"]["content"]), r.text
    r = seeing.post("/api/generate", {"prompt": "text", "system": "s", "images": images(png(40, 20)), **options})
    assert re.fullmatch(r"\[40x20, 1x2, .*?\]text", r.json()["response"]), r.text
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    shown = [{"role": "user", "content": "look"}, call, {"role": "tool", "content": "seen", "images": images(png(8, 8))}]
    with_picture = seeing.post("/api/chat", {"messages": shown, **options}).json()["prompt_eval_count"]
    shown[2] = {"role": "tool", "content": "[8x8, 2x2, 01234567]seen"}
    assert seeing.post("/api/chat", {"messages": shown, **options}).json()["prompt_eval_count"] == with_picture
    assert seeing.post("/api/chat", {"messages": [{"role": "user", "content": "", "images": images(png(8, 8))}], **options}).status_code == 200


@pytest.mark.parametrize("path,param,body", [
    ("/api/chat", "messages[0].images[1]", {"messages": [{"role": "user", "content": "a", "images": images(png(8, 8), b"hello")}]}),
    ("/api/chat", "messages[0].images[0]", {"messages": [{"role": "user", "content": "a", "images": ["!!"]}]}),
    ("/api/chat", "messages[0].images[0]", {"messages": [{"role": "user", "content": "a", "images": [5]}]}),
    ("/api/chat", "messages[0].images[0]", {"messages": [{"role": "user", "content": "a", "images": [address(png(8, 8))]}]}),
    ("/api/generate", "images[0]", {"prompt": "a", "images": ["https://example.org/a.png"]}),
    ("/api/chat", "messages[0].images[64]", {"messages": [{"role": "user", "content": "a", "images": images(b"a") * 65}]}),
    ("/api/chat", "messages[0].images", {"messages": [{"role": "user", "content": "a", "images": "aaaa"}]}),
    ("/api/chat", "messages[0].images", {"messages": [{"role": "system", "content": "a", "images": images(png(8, 8))}]}),
    ("/api/chat", "messages[1].images", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "images": images(png(8, 8))}]}),
    ("/api/generate", "images[0]", {"prompt": "a", "images": images(b"hello")}),
    ("/api/generate", "images", {"prompt": "a", "raw": True, "images": images(png(8, 8))})])
def test_refused_images_of_ollama(seeing, path, param, body):
    r = seeing.post(path, body)
    assert r.status_code == 400 and r.json()["param"] == param, r.text


def test_an_answer_shows_no_picture(seeing):
    """Neither do Anthropic's own models take pictures in messages of the assistant."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(8, 8)).decode()}}
    r = seeing.post("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [image]}]})
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages[1].content[0].type", r.text


def test_the_server_says_that_it_sees(seeing, shared):
    for daemon, sees in ((seeing, True), (shared, False)):
        assert ("vision" in daemon.post("/api/show", {"model": "tiny"}).json()["capabilities"]) == sees
        assert daemon.get("/props").json()["modalities"]["vision"] == sees
        assert daemon.get("/server_info").json()["sees_pictures"] == sees


# --- addresses ---

ASKED = []  # paths that the other server was asked for


class Other(http.server.BaseHTTPRequestHandler):
    """A server of pictures, which leads on, is too large, says nothing, or says no."""

    def do_GET(self):
        ASKED.append(self.path)
        name, _, rest = self.path[1:].partition("/")
        if name == "silent":
            time.sleep(30)
            return
        self.send_response({"to": 302, "round": 301, "none": 404}.get(name, 200))
        if name in ("to", "round"):
            self.send_header("Location", rest if name == "to" else self.path)
        data = {"picture.png": png(40, 20), "text": b"hello", "large": bytes((20 << 20) + 1), "empty": b""}.get(name, b"")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def others():
    """Ports of two such servers."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [server.server_port for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def fetching(others):
    """A server that may fetch from one of them by its address, and from a name that leads to the second."""
    if not FAKE:
        pytest.skip("leans on the fake engine's answers")
    hosts = (f"127.0.0.1:{others[0]}", f"localhost:{others[1]}", "*.example.com")
    daemon = Daemon(*[arg for host in hosts for arg in ("--allow-image-urls", host)],
                    env={"KEEPD_FAKE_PICTURES": "1", "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"})
    yield daemon
    assert daemon.stop() == 0


def test_pictures_of_addresses(fetching, others):
    here = f"http://127.0.0.1:{others[0]}"
    expected = seen(fetching, part(png(40, 20)), max_tokens=100)
    for address in (f"{here}/picture.png", f"{here}/to//picture.png", f"{here}/to/{here}/to//picture.png"):
        assert seen(fetching, part(address), max_tokens=100) == expected
    assert seen(fetching, {"type": "input_image", "image_url": f"{here}/picture.png"}, max_tokens=100) == expected
    block = {"type": "image", "source": {"type": "url", "url": f"{here}/picture.png"}}
    r = fetching.post("/v1/messages", {"model": "tiny", "max_tokens": 100, "temperature": 0, "messages": user(block)})
    assert r.status_code == 200 and r.json()["content"][0]["text"] == expected, r.text


@pytest.mark.parametrize("url,why", [
    ("http://127.0.0.1:{port}/none", "status 404"), ("http://127.0.0.1:{port}/text", "this is no picture"),
    ("http://127.0.0.1:{port}/large", "more than 20971520 bytes"), ("http://127.0.0.1:{port}/empty", "this is no picture"),
    ("http://127.0.0.1:{port}/round", "more than 3 times"),
    ("http://localhost:{second}/picture.png", "no public address"), ("http://127.0.0.1:{port}/to/http://localhost:{second}/picture.png", "no public address"),
    ("http://127.0.0.1:{port}/to/http://127.0.0.2:{port}/picture.png", "--allow-image-urls"), ("http://127.0.0.1/picture.png", "--allow-image-urls"),
    ("http://127.0.0.1:{port}/to/file:///etc/passwd", "no http or https"), ("http://a:b@127.0.0.1:{port}/picture.png", "a user's name"),
    ("http://[::1]:{port}/picture.png", "--allow-image-urls"), ("https://example.com/picture.png", "--allow-image-urls"),
    ("http://a.example.com:81/picture.png", "--allow-image-urls"), ("https://a.example.com.evil/picture.png", "--allow-image-urls"), ("http://", "no http or https")])
def test_refused_addresses(fetching, others, url, why):
    ASKED.clear()
    r = fetching.chat(messages=user(part(url.replace("{port}", str(others[0])).replace("{second}", str(others[1])))), max_tokens=5)
    assert r.status_code == 400 and r.json()["error"]["param"] == WHOLE and why in r.json()["error"]["message"], r.text
    assert len(ASKED) == (4 if "round" in url else url.startswith("http://127.0.0.1:{")), ASKED


@contextlib.contextmanager
def silence(daemon, port, count):
    """So many requests whose pictures do not come. In the end their clients leave."""
    ASKED.clear()
    body = json.dumps({"messages": user(*[part(f"http://127.0.0.1:{port}/silent")] * 2)}).encode()
    sockets = [daemon.socket() for _ in range(count)]
    for s in sockets:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    daemon.wait("hosts that are asked", lambda: len(ASKED) == min(count, 2))
    yield
    for s in sockets:
        s.close()


def test_hosts_that_say_nothing_hold_up_nobody(fetching, others):
    with silence(fetching, others[0], 4):
        begin = time.monotonic()
        assert fetching.post("/tokenize", {"prompt": "word " * 20000}).status_code == 200
        assert seen(fetching, part(png(40, 20)), max_tokens=100).startswith("[40x20")
        assert time.monotonic() - begin < 4
    begin = time.monotonic()  # pictures of clients that left are not waited for
    assert seen(fetching, part(f"http://127.0.0.1:{others[0]}/picture.png"), max_tokens=100).startswith("[40x20")
    assert time.monotonic() - begin < 4


def test_a_name_that_is_never_found_holds_its_place_for_seconds(others):
    resolver = find_built("tests/silent_resolver.so")
    if not FAKE or resolver is None:
        pytest.skip("leans on the fake engine's answers, and on silent_resolver")
    options = ":".join(filter(None, (os.environ.get("ASAN_OPTIONS"), "verify_asan_link_order=0")))
    daemon = Daemon("--allow-image-urls", f"127.0.0.1:{others[0]}", "--allow-image-urls", "silent.invalid",
                    env={"KEEPD_FAKE_PICTURES": "1", "LD_PRELOAD": str(resolver), "ASAN_OPTIONS": options})
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for r in pool.map(lambda _: daemon.chat(messages=user(part("http://silent.invalid/a.png"))), range(2)):
            assert r.status_code == 400 and "takes too long" in r.text
    assert seen(daemon, part(f"http://127.0.0.1:{others[0]}/picture.png"), max_tokens=100).startswith("[40x20")
    assert time.monotonic() - begin < 9
    assert daemon.stop() == 0


def test_a_stop_waits_for_no_host(others):
    if not FAKE:
        pytest.skip("leans on the fake engine's answers")
    daemon = Daemon("--allow-image-urls", f"127.0.0.1:{others[0]}", env={"KEEPD_FAKE_PICTURES": "1"})
    with silence(daemon, others[0], 1):
        begin = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(20)
        assert time.monotonic() - begin < 6


def test_a_start_refuses_what_is_no_host():
    for host in ("http://example.com", "a:0", "a:70000", "*", "*.", "", "[::1", "a b"):
        run = subprocess.run([find_built("server/keepd-fake"), "--model", str(MODEL), "--port", "0", "--allow-image-urls", host], capture_output=True, text=True, timeout=60)
        assert run.returncode == 78 and "allow-image-urls" in run.stderr, (host, run.stderr)


def test_bombs_are_refused_by_their_headers(seeing):
    """Files of a kilobyte with 500 megapixels, or as many as the format has: refused before anything is decoded, and nobody else notices.
    The printed times are below 50 ms on two cores without sanitizers."""
    expected = {"png_of_500_megapixels": "25000 x 20000", "jpeg_of_500_megapixels": "25000 x 20000", "webp_of_268_megapixels": "16384 x 16384",
                "gif_of_500_megapixels": "25000 x 20000", "jpeg_of_many_scans": "200 scans", "gif_of_clear_codes": "damaged"}
    other = seen(seeing, part(png(40, 20)), max_tokens=100)
    for name, why in expected.items():
        refused = [seeing.chat(messages=user(part((CORPUS / name).read_bytes())), max_tokens=5) for _ in range(5)]
        assert all(r.status_code == 400 and why in r.text for r in refused), (name, refused[0].text)
        ms = [round(1000 * r.elapsed.total_seconds(), 1) for r in refused]
        print(f"{name}: {ms} ms")
    assert seen(seeing, part(png(40, 20)), max_tokens=100) == other


def test_every_kind_of_file(seeing):
    """The fuzzer's first files, all at once: each is an answer, or a refusal that says why."""
    files = sorted(CORPUS.iterdir())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda f: seeing.chat(messages=user(part(f.read_bytes())), max_tokens=100, temperature=0), files))
    refused = {f.name for f, r in zip(files, answers) if r.status_code == 400}
    assert refused == {f.name for f in files if "megapixels" in f.name or f.name in ("jpeg_of_many_scans", "gif_of_clear_codes")}
    assert all(r.status_code == 200 or "messages[0].content[0]" in r.text for r in answers)
    shown = {f.name: r.json()["choices"][0]["message"]["content"] for f, r in zip(files, answers) if r.status_code == 200}
    assert all(re.match(r"\[\d+x\d+, ", text) for text in shown.values())
    assert shown["gif"] == shown["gif_interlaced"] and shown["gif_of_256_colours"] == shown["png_rgb"] == shown["png_with_a_large_zTXt"]


def test_too_many_pictures(seeing):
    data = png(2, 2)
    assert seeing.chat(messages=user(*[part(data, detail="low")] * 20), max_tokens=5).status_code == 200
    r = seeing.chat(messages=user(*[part(data, detail="low")] * 65), max_tokens=5)
    assert r.status_code == 400 and "at most 64 pictures" in r.text
    r = seeing.chat(messages=user(*[part(png(40, 40))] * 64), max_tokens=5)
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"


def test_the_memory_of_pictures_is_counted(seeing):
    assert seeing.chat(messages=user(part(png(40, 40))), max_tokens=5).status_code == 200
    seeing.wait("the end", lambda: seeing.metrics()["keepd_picture_bytes",] == 0)


def test_a_client_sets_no_places(seeing):
    """The member that says where pictures stand is the server's own."""
    message = {**user("a")[0], "picture_ends": [1, 0, 7]}
    assert seeing.chat(messages=[message], temperature=0).status_code == 200


def test_no_process_is_left(seeing):
    for data in (b"hello", png(9, 9), png(9, 9)[:40]):
        seeing.chat(messages=user(part(data)), max_tokens=5)
    threads = list(pathlib.Path(f"/proc/{seeing.process.pid}/task").iterdir())   # each lists those that it started
    assert len(threads) > 1 and [(t / "children").read_text() for t in threads] == [""] * len(threads)


def test_texts_do_not_wait_for_pictures(seeing):
    """A small file may have many pixels: texts have threads that pictures leave free."""
    rows = zlib.compress(bytes(1 + 2504 // 8) * 2504, 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 2504, 2504, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    slow = user(*[part(b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
                                                        for name, data in chunks))] * 2)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(seeing.chat, messages=slow, max_tokens=1) for _ in range(8)]
        seeing.wait("all pictures", lambda: seeing.metrics()["keepd_connections",] > 8)
        assert seeing.chat(messages=user("a"), max_tokens=1).status_code == 200
        assert not all(w.done() for w in waiting)
        assert {w.result().status_code for w in waiting} == {200}


def test_a_model_without_eyes_refuses(shared):
    r = shared.chat(messages=user(part(png(9, 9))), max_tokens=5)
    assert r.status_code == 400
    assert r.json()["error"]["param"] == "messages[0].content[0].type" and r.json()["error"]["code"] == "unsupported_parameter"
    assert "this model sees no pictures" in r.json()["error"]["message"]
