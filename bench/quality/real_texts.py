#!/usr/bin/env python3
"""Writes texts of five kinds for texts.py, made of what a Debian system has: none of it is in bundled/calibration.

    real_texts.py FOLDER        writes FOLDER/documents/*.txt, code/, languages/, chats.jsonl and tools.jsonl

documents: manual pages (sections 5 and 7) and Perl's documentation. code: modules of Python and Perl, C headers. languages: manual
pages in German, French, Spanish, Russian, Japanese and Chinese, two of each. chats: facts told early, passages of manual pages in
between, questions in the second half. tools: sessions whose tools list folders, read logs and files; later turns ask for what they printed.
The names, values, forms of sentences and files are other than those of the calibration. The same system gives the same texts.
"""
import glob
import gzip
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap

COUNT = 12                      # texts of a kind
LANGUAGES = ("de", "fr", "es", "ru", "ja", "zh_CN")
CODE = ("/usr/lib/python3*/argparse.py", "/usr/lib/python3*/heapq.py", "/usr/lib/python3*/shelve.py", "/usr/lib/python3*/tarfile.py",
        "/usr/lib/python3*/json/encoder.py", "/usr/share/perl/5*/Text/Wrap.pm", "/usr/share/perl/5*/Getopt/Long.pm",
        "/usr/share/perl/5*/File/Find.pm", "/usr/include/zlib.h", "/usr/include/x86_64-linux-gnu/sys/queue.h",
        "/usr/include/elf.h", "/usr/lib/python3*/textwrap.py", "/usr/lib/python3*/csv.py", "/usr/lib/python3*/calendar.py")


def page(path):
    """A manual page as plain text."""
    source = gzip.open(path).read() if path.endswith(".gz") else pathlib.Path(path).read_bytes()
    run = subprocess.run(["groff", "-k", "-Tutf8", "-P-cbou", "-mandoc", "-rLL=100n"], input=source, capture_output=True, check=False)
    return re.sub(r"\n{3,}", "\n\n", run.stdout.decode(errors="replace"))


def pages(pattern, least, count, rng):
    """(name, text) of pages with at least so many characters."""
    paths = sorted(glob.glob(pattern))
    rng.shuffle(paths)
    found = []
    for path in paths:
        if os.path.islink(path):
            continue
        text = page(path)
        if len(text) >= least:
            found.append((os.path.basename(path), text))
        if len(found) == count:
            break
    return found


def paragraphs(texts):
    for _, text in texts:
        for part in re.split(r"\n\s*\n", text):
            part = " ".join(part.split())
            if 160 < len(part) < 420 and part[0].isupper() and part.endswith("."):
                yield part


# --- Chats ---

PEOPLE = "Aurelio Brigid Cosima Dragan Eleni Fabrizio Greta Hamid Ilse Joaquin Katarina Leander Mirela Nils Ottilie Pavel Rosalind Sander".split()
TOWNS = "Aveiro Bergamo Cuenca Delft Esbjerg Fulda Gdynia Hasselt Imola Jelgava Kuopio Linz Maribor Nantes Olomouc Pecs".split()
THINGS = ("a cello", "an old canoe", "two goats", "a letterpress", "a weather station", "a greenhouse", "a kiln", "a tandem", "a loom", "a telescope")


def fact(rng):
    who, town, thing, number = rng.choice(PEOPLE), rng.choice(TOWNS), rng.choice(THINGS), rng.randint(103, 987)
    return rng.choice([
        (f"By the way, my neighbour {who} has just bought {thing}.", f"What was it that {who} bought?", f"{who} bought {thing}."),
        (f"Please remember that the parcel for {who} has the number {number}.", f"Which number has {who}'s parcel?", f"The parcel for {who} has the number {number}."),
        (f"On Friday I take the train to {town}, where {who} will meet me.", f"Where does {who} meet me?", f"{who} meets you in {town}."),
        (f"{who} owes me {number} crowns since the trip to {town}.", f"How much money do I get back from {who}?", f"{who} owes you {number} crowns since the trip to {town}."),
    ]), who


def chat(rng, passages, length):
    """Facts and passages until half of the length (in characters), then questions with small passages between them."""
    facts, used = [], set()
    messages, size = [], 0

    def say(user, answer):
        nonlocal size
        messages.extend([{"role": "user", "content": user}, {"role": "assistant", "content": answer}])
        size += len(user) + len(answer) + 40

    while size < 0.5 * length:
        new, who = fact(rng)
        if who not in used:
            used.add(who)
            facts.append(new)
            say(new[0], rng.choice(["Thank you for telling me.", "I see, I will keep it in mind.", "All right."]))
        text = rng.choice(passages)
        say(f"Now something else. I read this in a manual: {text} Is it about software?", "Yes, it describes how a program behaves.")
    while size < 1.3 * length:
        for new in rng.sample(facts, len(facts)):
            say(new[1], new[2])
        text = rng.choice(passages)
        say(f"And in another manual: {text}", "That is a different program.")
    return {"messages": messages}


# --- Tool sessions ---

def listing(rng):
    while True:
        folder = rng.choice([p for p in sorted(glob.glob("/usr/lib/python3*/*/") + glob.glob("/usr/share/perl/5*/*/"))])
        files = [f for f in sorted(os.scandir(folder), key=lambda f: f.name) if f.is_file()]
        if len(files) >= 6:
            break
    files = files[:24]
    text = "\n".join(f"-rw-r--r-- 1 root root {f.stat().st_size:7d} {f.name}" for f in files)
    asked = rng.choice(files)
    return ("list_folder", {"path": folder}, text, f"How many bytes does {asked.name} have?", f"{asked.name} has {asked.stat().st_size} bytes.")


def log(rng):
    hosts = ["gull", "heron", "ibis", "lark", "swift"]
    lines, second = [], rng.randint(0, 80000)
    errors = []
    for i in range(22):
        second += rng.randint(1, 90)
        at = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        host, job, took = rng.choice(hosts), rng.randint(1000, 9999), rng.randint(3, 900)
        if rng.random() < 0.15 or i == 9:
            errors.append((job, host, at))
            lines.append(f"{at} {host} batchd[{rng.randint(300, 900)}]: job {job} failed: exit status {rng.randint(1, 127)}")
        else:
            lines.append(f"{at} {host} batchd[{rng.randint(300, 900)}]: job {job} done in {took} s")
    job, host, at = rng.choice(errors)
    return ("read_log", {"unit": "batchd", "lines": 22}, "\n".join(lines), f"On which host did job {job} fail, and when?", f"Job {job} failed on {host} at {at}.")


def record(rng):
    rows = [{"id": rng.randint(10000, 99999), "owner": rng.choice(PEOPLE), "city": rng.choice(TOWNS), "open": rng.random() < 0.5, "amount": rng.randint(100, 9999) / 10}
            for _ in range(9)]
    row = rng.choice(rows)
    return ("query", {"table": "invoices", "limit": 9}, json.dumps(rows, indent=1), f"Whose is invoice {row['id']}, and over how much?",
            f"Invoice {row['id']} is {row['owner']}'s, over {row['amount']}.")


def source(rng):
    path = rng.choice(sorted(glob.glob("/usr/lib/python3*/*.py")))
    lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    at = rng.randrange(max(1, len(lines) - 40))
    shown = lines[at:at + 28]
    line = max(range(len(shown)), key=lambda i: len(shown[i]))
    return ("read_file", {"path": path, "from": at + 1}, "\n".join(f"{at + 1 + i}\t{text}" for i, text in enumerate(shown)),
            f"What is in line {at + 1 + line} of {os.path.basename(path)}?", f"Line {at + 1 + line} is:\n{shown[line]}")


ASKED = {"list_folder": "Show me what is in {path}.", "read_log": "What do the last lines of the log of {unit} say?", "query": "Fetch the newest rows of {table}.",
         "read_file": "Open {path} near line {from}."}


def session(rng, length):
    messages = [{"role": "system", "content": "You administer a small server with the tools list_folder, read_log, query and read_file."}]
    open_questions, size = [], 0
    while size < 1.4 * length:
        name, arguments, result, question, answer = rng.choice([listing, log, record, source])(rng)
        ident = f"call{len(messages)}"
        messages += [{"role": "user", "content": ASKED[name].format(**arguments)},
                     {"role": "assistant", "content": None, "tool_calls": [{"id": ident, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]},
                     {"role": "tool", "tool_call_id": ident, "content": result},
                     {"role": "assistant", "content": rng.choice(["Here it is.", "That is what it says.", "Done."])}]
        open_questions.append((question, answer))
        size += len(result) + 200
        if size > 0.45 * length:
            for question, answer in rng.sample(open_questions, min(3, len(open_questions))):
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                size += len(question) + len(answer)
    return {"messages": messages}


def main():
    out = pathlib.Path(sys.argv[1])
    rng = random.Random(35)
    manual = pages("/usr/share/man/man7/*", 9000, COUNT, rng) + pages("/usr/share/man/man5/*", 9000, COUNT, rng)
    pods = sorted({os.path.realpath(p) for p in glob.glob("/usr/share/perl/5*/pod/*.pod")})     # 5.36 is a link to 5.36.0
    perl = [(os.path.basename(p), page_of_pod(p)) for p in pods[:3]]
    documents = (perl + [manual[i + j * COUNT] for i in range(COUNT) for j in (0, 1) if i + j * COUNT < len(manual)])[:COUNT]
    code = [(f"{i:02d}", pathlib.Path(p[0]).read_text(errors="replace")) for i, g in enumerate(CODE) if (p := sorted(glob.glob(g)))][:COUNT]
    foreign = [pages(f"/usr/share/man/{lang}/man*/*", 7000, 2, rng) for lang in LANGUAGES]
    languages = [found[i] for i in range(2) for found in foreign if len(found) > i]
    for kind, texts in (("documents", documents), ("code", code), ("languages", languages)):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for i, (_, text) in enumerate(texts):
            lines = text.splitlines()
            (out / kind / f"{i:02d}.txt").write_text("\n".join(lines[min(20, len(lines) // 10):])[:24000])
    passages = list(paragraphs(manual))
    for kind, made in (("chats", [chat(rng, passages, 4200) for _ in range(COUNT)]), ("tools", [session(rng, 4200) for _ in range(COUNT)])):
        (out / f"{kind}.jsonl").write_text("".join(json.dumps(m) + "\n" for m in made))
    print({kind: len(texts) for kind, texts in (("documents", documents), ("code", code), ("languages", languages))})


def page_of_pod(path):
    run = subprocess.run(["pod2text", path], capture_output=True, text=True, check=False)
    return run.stdout


if __name__ == "__main__":
    main()
