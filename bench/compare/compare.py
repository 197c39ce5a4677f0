#!/usr/bin/env python3
"""keepd beside llama.cpp's server: the same weights, requests and threads, on this machine, now.

    compare.py --llama-server PATH --whole DIR --thin DIR [what ...]

    short     prompt and generation rates at batch 1, 8 and 32, without eviction: --whole
    long      one conversation that grows to the --lengths: rates and resident memory on the way: --thin
    crowd     eight conversations of --crowd-length tokens that answer together: --thin
    fit       conversations that run at once in a given cache: --thin
    answers   whether greedy answers are the same: --trained, with the full cache on both

DIR is a model directory with DIR.gguf beside it (make_model.py). Rates are the client's: from the moment of a
request to its first event, and between events of streams that all generate. Both servers are up; the one whose
turn it is not is stopped (SIGSTOP). Turns alternate, and what is compared is the ratio of two turns next to each
other: its median over all rounds, with the lowest and the highest. Each server has its own defaults, except what
is asked of both (threads, places, length) and llama.cpp's prompt cache in memory, which is off: nothing here
comes twice. keepd's cache is bf16, llama.cpp's f16: the same bytes.
"""
import argparse
import concurrent.futures as futures
import contextlib
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGET, BUFFER, CHUNK = 1024, 128, 512
CROWD = 8
SETTLE = 0.3            # seconds before a turn, for what the other one leaves behind
FIT_BYTES = 4 << 30
TIMEOUT = 1800


# --- the two servers ------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server of its own process, stopped while it has no turn. Subclasses say how it is started and asked."""

    def __init__(self, args, model, options):
        self.port, self.model = free_port(), model
        self.log = open(args.logs / f"{self.name}-{self.port}.log", "w")
        nice = ["nice", "-n", str(args.nice)] if args.nice else []
        self.process = subprocess.Popen([*nice, *self.command(args, model, options)], stdout=self.log, stderr=self.log)
        self.wait_ready()
        self.stream([1, 2, 3, 4], 4)    # pages touched
        self.pause()

    def wait_ready(self):
        while self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.call("GET", "/health").status == 200:
                    return
            time.sleep(0.2)
        sys.exit(f"{self.name} did not start: {self.log.name}")

    def call(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        c.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        return c.getresponse()

    def stream(self, prompt, tokens, cached=False):
        """[the moments at which tokens came], the request's being 0."""
        start, lines = time.perf_counter(), []
        path, body = self.request(prompt, tokens, cached)
        with self.call("POST", path, {**body, "stream": True}) as r:
            if r.status != 200:
                sys.exit(f"{self.name}: {r.read().decode()}")
            for line in r:
                if line.startswith(b"data: {"):
                    lines.append((time.perf_counter() - start, line))
        # Parsed afterwards: until then the processors belong to the server.
        moments = [moment for moment, line in lines if self.has_token(json.loads(line[6:]))]
        if not 0.8 * tokens <= len(moments) <= tokens:    # a token that ends inside a character has no event
            sys.exit(f"{self.name}: {len(moments)} events for {tokens} tokens")
        return moments

    def together(self, prompts, tokens, cached=False):
        with futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p: self.stream(p, tokens, cached), prompts))

    def resident(self):
        """Bytes in memory, file pages included."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self):
        self.process.send_signal(signal.SIGCONT)
        time.sleep(SETTLE)
        yield self
        self.pause()

    def stop(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Keepd(Server):
    name = "keepd"

    def command(self, args, model, o):
        full = ["--kv-policy", "full"] if o.get("full") else ["--kv-budget", str(BUDGET)]
        pool = ["--kv-pool-bytes", str(o["pool"])] if "pool" in o else []
        return [args.keepd, "--model", str(model), "--served-model-name", "m", "--port", str(self.port), "--threads",
                str(args.threads), "--max-num-seqs", str(o["places"]), "--log-level", "warn", *full, *pool, *o.get("options", [])]

    def request(self, prompt, tokens, cached):
        return "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                                   "ignore_eos": True, "speculate": 0, "kv": {"reuse": cached, "retain": cached}}

    def has_token(self, event):
        """The last token's event also has the reason why the answer ended."""
        return any(c["finish_reason"] is None or c["text"] for c in event["choices"])

    def ids(self, prompt, tokens):
        path, body = self.request(prompt, tokens, False)
        body |= {"return_token_ids": True, "ignore_eos": False}
        return json.loads(self.call("POST", path, body).read())["choices"][0]["token_ids"]

    def tokens(self, text):
        body = {"model": "m", "prompt": text, "parse_special": True}
        return json.loads(self.call("POST", "/tokenize", body).read())["tokens"]

    def running(self):
        return json.loads(self.call("GET", "/kv").read())["running_count"]


class Llama(Server):
    name = "llama.cpp"

    def command(self, args, model, o):
        return [args.llama_server, "-m", f"{model}.gguf", "--host", "127.0.0.1", "--port", str(self.port),
                "-t", str(args.threads), "-tb", str(args.threads), "-np", str(o["places"]),
                "-c", str(o["places"] * o["length"]), "--no-kv-unified", "--cache-ram", "0", "--no-ui",
                *args.llama_options.split()]

    def request(self, prompt, tokens, cached):
        return "/completion", {"prompt": prompt, "n_predict": tokens, "temperature": 0, "samplers": ["temperature"],
                               "ignore_eos": True, "cache_prompt": cached}

    def has_token(self, event):
        return not event["stop"]

    def ids(self, prompt, tokens):
        path, body = self.request(prompt, tokens, False)
        return json.loads(self.call("POST", path, {**body, "return_tokens": True, "ignore_eos": False}).read())["tokens"]


@contextlib.contextmanager
def both(args, model, **options):
    servers = []
    try:
        for kind in (Keepd, Llama):
            servers.append(kind(args, model, options))
        yield servers
    finally:
        for s in servers:
            s.stop()


# --- measurements ---------------------------------------------------------------------------------


def prompt_of(rng, tokens):
    return [rng.randrange(300, 20000) for _ in range(tokens)]


def reading(server, rng, tokens):
    return tokens / server.stream(prompt_of(rng, tokens), 1)[0]


def joint_rate(streams):
    """Tokens per second while all streams generate. Where that is less than half of the time from the first token to the last,
    which says little, those of all that time."""
    first, last = min(s[0] for s in streams), max(s[-1] for s in streams)
    start, end = max(s[0] for s in streams), min(s[-1] for s in streams)
    if end - start < (last - first) / 2:
        start, end = first, last
    return sum(start < t <= end for s in streams for t in s) / (end - start)


WORDS = "river stone garden copper yellow window mountain paper silver bridge candle winter forest market engine letter".split()


def words_of(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def generating(server, rng, batch, tokens, prompt=prompt_of):
    return joint_rate(server.together([prompt(rng, 16) for _ in range(batch)], tokens))


SHORT = {"prompt of 512": lambda s, rng: reading(s, rng, 512),
         "prompt of 2,048": lambda s, rng: reading(s, rng, 2048),
         "generation, batch 1": lambda s, rng: generating(s, rng, 1, 32),
         "generation, batch 8": lambda s, rng: generating(s, rng, 8, 32),
         "generation, batch 32": lambda s, rng: generating(s, rng, 32, 32)}


class Pairs:
    """{what: [(keepd, llama.cpp)]}, one pair per round."""

    def __init__(self):
        self.rows = {}

    def add(self, what, keepd, llama):
        self.rows.setdefault(what, []).append((keepd, llama))
        print(f"  {what}: {keepd:.4g} and {llama:.4g}, {keepd / llama:.2f}", file=sys.stderr, flush=True)

    def table(self, title, show):
        lines = [f"\n| {title} | keepd | llama.cpp | keepd / llama.cpp (all rounds) |", "|---|--:|--:|--:|"]
        for what, pairs in self.rows.items():
            ratios = sorted(a / b for a, b in pairs)
            middle = [show(statistics.median(column)) for column in zip(*pairs)]
            lines.append(f"| {what} | {middle[0]} | {middle[1]} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |")
        return "\n".join(lines)


def turns(servers, number):
    """Alternates the order of the servers with every round."""
    return servers if number % 2 == 0 else servers[::-1]


def measured(servers, number, measure):
    """[keepd's, llama.cpp's] of one round."""
    found = {}
    for s in turns(servers, number):
        with s.turn():
            found[s.name] = measure(s)
    return [found[s.name] for s in servers]


def short(args):
    rates = Pairs()
    with both(args, args.whole, places=32, length=2304) as servers:
        for number in range(args.rounds):
            for what, measure in SHORT.items():
                rates.add(what, *measured(servers, number, lambda s: measure(s, random.Random(number))))
    return [(rates, "Qwen3-0.6B shape, tokens/s", "{:.1f}".format)]


def long(args):
    """The prompt of each length begins with that of the one before, which both go on from."""
    rates, memory, lengths = Pairs(), Pairs(), args.lengths
    with both(args, args.thin, places=1, length=lengths[-1] + 256) as servers:
        memory.add("at start", *(s.resident() for s in servers))
        for number in range(args.rounds):
            text = prompt_of(random.Random(1000 + number), lengths[-1])
            for before, length in zip((0, *lengths), lengths):
                streams = measured(servers, number, lambda s: s.stream(text[:length], 49, cached=True))
                rates.add(f"prompt, tokens {before:,} to {length:,}", *((length - before) / s[0] for s in streams))
                rates.add(f"generation, {length:,} seen", *(joint_rate([s]) for s in streams))
                memory.add(f"{length:,} seen", *(s.resident() for s in servers))
    return [(rates, "one conversation, tokens/s", "{:.1f}".format),
            (memory, "resident, MiB", lambda b: f"{b / 2 ** 20:.0f}")]


def crowd(args):
    rates, memory = Pairs(), Pairs()
    with both(args, args.thin, places=CROWD, length=args.crowd_length + 256) as servers:
        for number in range(args.rounds):
            texts = [prompt_of(random.Random(100 * number + i), args.crowd_length) for i in range(CROWD)]
            measured(servers, number, lambda s: s.together(texts, 1, cached=True))
            again = [t + prompt_of(random.Random(i), 16) for i, t in enumerate(texts)]
            streams = measured(servers, number, lambda s: s.together(again, 49, cached=True))
            rates.add(f"generation, batch {CROWD}, {args.crowd_length:,} seen each", *(joint_rate(s) for s in streams))
            memory.add(f"{CROWD} conversations, {args.crowd_length:,} seen each", *(s.resident() for s in servers))
    return [(rates, "tokens/s", "{:.1f}".format), (memory, "resident, MiB", lambda b: f"{b / 2 ** 20:.0f}")]


# --- how many fit ---------------------------------------------------------------------------------


def running_at_once(keepd, asked, length):
    """Most requests that run at once, of `asked` that all want to; then their clients leave."""
    path, body = keepd.request(prompt_of(random.Random(1), 2 * (BUDGET + BUFFER + CHUNK)), length, False)
    clients = [http.client.HTTPConnection("127.0.0.1", keepd.port, timeout=TIMEOUT) for _ in range(asked)]
    for c in clients:
        c.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    most, until = 0, time.perf_counter() + 20
    while time.perf_counter() < until:
        most = max(most, keepd.running())
        time.sleep(0.2)
    for c in clients:
        c.close()
    return most


def fit(args):
    """The thin model has a part of the layers: so does the cache."""
    thin, whole = (json.loads((d / "config.json").read_text()) for d in (args.thin, args.whole))
    layers = thin["num_hidden_layers"]
    pool = FIT_BYTES * layers // whole["num_hidden_layers"]
    token = layers * thin["num_key_value_heads"] * thin["head_dim"] * 2 * 2
    keepd = Keepd(args, args.thin, {"places": 128, "pool": pool})
    try:
        with keepd.turn():
            most = running_at_once(keepd, 64, 30000)
    finally:
        keepd.stop()
    pairs = Pairs()
    for length in args.lengths[1:]:
        pairs.add(f"{length:,} tokens each", most, pool // token // length)
    return [(pairs, f"conversations in {FIT_BYTES >> 30} GiB of cache", "{:.0f}".format)]


# --- answers --------------------------------------------------------------------------------------


NAMES = ("Nora", "Emil", "Ida", "Jonas", "Mara", "Tom", "Vera", "Leo", "Anna", "Paul")
TOWNS = ("Lisbon", "Oslo", "Vienna", "Prague", "Madrid", "Dublin", "Turin", "Berlin")


def dialogue(rng):
    """A dialogue like keepd-nano's training text: a fact and the question for it."""
    name, town, code = rng.choice(NAMES), rng.choice(TOWNS), rng.randrange(1000, 10000)
    turns = (("user", f"My sister {name} lives in {town}. The code of the garage is {code}."), ("assistant", "Noted."),
             ("user", rng.choice(("What is the code of the garage?", f"Where does my sister {name} live?"))))
    return "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns) + "<|im_start|>assistant\n"


def pages(keepd):
    """This repository's own pages, of which keepd-nano knows nothing: one token is hardly likelier than the next."""
    ids = []
    for page in ("README.md", "docs/CHOOSING.md", "docs/OPERATIONS.md"):
        ids += keepd.tokens((ROOT / page).read_text())
    return [ids[at:at + 256] for at in range(0, len(ids) - 256, 256)]


def same_until(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def answers(args):
    count = 32
    with both(args, args.trained, places=1, length=1024, full=True) as servers:
        with servers[0].turn() as keepd:
            rng = random.Random(1)
            prompts = {"dialogues": [keepd.tokens(dialogue(rng)) for _ in range(args.prompts)],
                       "pages": pages(keepd)[:args.prompts]}
        for what, texts in prompts.items():
            found = measured(servers, 0, lambda s: [s.ids(p, count) for p in texts])
            agree = [same_until(a, b) for a, b in zip(*found)]
            whole = sum(a == b for a, b in zip(*found))
            print(f"\n{args.trained.name}, full cache on both, {len(texts)} {what}, up to {count} greedy tokens each: {whole} answers "
                  f"the same to the end; on the average {statistics.mean(agree):.1f} tokens before they part", flush=True)
    return []


# --- report ---------------------------------------------------------------------------------------


def about(args):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    version = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return {"date": datetime.date.today().isoformat(), "cpu": cpu[1] if cpu else "unknown", "threads": args.threads,
            "keepd": commit.stdout.strip(), "llama.cpp": (version.stdout + version.stderr).strip(),
            "llama_options": args.llama_options, "load": os.getloadavg()}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {"short": short, "long": long, "crowd": crowd, "fit": fit, "answers": answers}
    ap.add_argument("what", nargs="*", help=f"of {', '.join(what)}; default: all")
    ap.add_argument("--llama-server", required=True, metavar="PATH")
    ap.add_argument("--llama-options", default="", help="more of them, as one word")
    ap.add_argument("--keepd", default=str(ROOT / "build" / "keepd"))
    ap.add_argument("--whole", type=pathlib.Path, required=True, metavar="DIR")
    ap.add_argument("--thin", type=pathlib.Path, required=True, metavar="DIR")
    ap.add_argument("--trained", type=pathlib.Path, metavar="DIR", help="for answers: DIR and DIR.gguf")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 16384, 32768], metavar="N")
    ap.add_argument("--crowd-length", type=int, default=8192, metavar="N")
    ap.add_argument("--prompts", type=int, default=50)
    ap.add_argument("--nice", type=int, default=0, help="of the servers")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "compare")
    a = ap.parse_args()
    a.logs = a.out
    a.out.mkdir(parents=True, exist_ok=True)
    facts = about(a)
    for name in a.what or what:
        tables = what[name](a)
        (a.out / f"{name}.json").write_text(json.dumps({**facts, "pairs": [t[0].rows for t in tables]}, indent=1) + "\n")
        for pairs, title, show in tables:
            print(pairs.table(title, show), flush=True)


if __name__ == "__main__":
    main()
