#!/usr/bin/env python3
"""Checks the OCI image: the layout's digests and sizes, then the image in use: not as root, with its own libraries alone.

    image.py IMAGE.tar

Running it needs root, for chroot; without, only the layout is checked. skopeo reads it, too, where it is installed."""
import gzip
import hashlib
import io
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request

SECONDS = 60
FACT = "My sister Nora lives in Lisbon. The code of the garage is 4815."


class Image:
    def __init__(self, path):
        with tarfile.open(path) as tar:
            self.files = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}
        assert json.loads(self.files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
        [entry] = json.loads(self.files["index.json"])["manifests"]
        manifest = json.loads(self.blob(entry))
        assert manifest["schemaVersion"] == 2 and len(manifest["layers"]) == 1
        self.config = json.loads(self.blob(manifest["config"]))
        self.layer = self.blob(manifest["layers"][0])
        assert len(self.files) == 5, sorted(self.files)

    def blob(self, entry):
        data = self.files[entry["digest"].replace("sha256:", "blobs/sha256/")]
        assert len(data) == entry["size"] and "sha256:" + hashlib.sha256(data).hexdigest() == entry["digest"]
        return data

    def unpack(self, root):
        with tarfile.open(fileobj=io.BytesIO(self.layer), mode="r:gz") as tar:
            names = [entry.name for entry in tar]
            assert len(names) == len(set(names)), "a name comes twice"
            tar.extractall(root)
        plain = gzip.decompress(self.layer)
        assert self.config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(plain).hexdigest()]


def inside(root, user, command):
    user, group = user.split(":")
    return [shutil.which("chroot"), f"--userspec={user}:{group}", "--groups=", str(root), *command]


def ask(url):
    body = {"messages": [{"role": "user", "content": FACT}, {"role": "assistant", "content": "Noted."},
                         {"role": "user", "content": "What is the code of the garage?"}], "temperature": 0}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def use(image, root):
    config = image.config["config"]
    env = dict(value.split("=", 1) for value in config["Env"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    assert config["User"].split(":")[0] != "0"
    health = [*config["Healthcheck"]["Test"][1:], f"http://127.0.0.1:{port}"]
    daemon = subprocess.Popen(inside(root, config["User"], [*config["Entrypoint"], *config["Cmd"], "--port", str(port)]),
                              stdout=subprocess.PIPE, text=True, env=env)
    try:
        end = time.monotonic() + SECONDS
        while "ready at" not in (line := daemon.stdout.readline()):
            assert line and time.monotonic() < end, f"keepd did not become ready: exit {daemon.poll()}"
        status = pathlib.Path(f"/proc/{daemon.pid}/status").read_text()
        assert f"\nUid:\t{config['User'].split(':')[0]}\t" in status, "it runs as another user"
        answer = ask(f"http://127.0.0.1:{port}")
        assert "4815" in answer, answer
        healthy = subprocess.run(inside(root, config["User"], health), stdin=subprocess.DEVNULL, check=False, env=env)
        assert healthy.returncode == 0
    finally:
        daemon.terminate()
    assert daemon.wait(timeout=SECONDS) == 0
    assert list((root / "var/lib/keepd/state").iterdir()), "no conversation was kept"
    sick = subprocess.run(inside(root, config["User"], health), stdin=subprocess.DEVNULL, check=False, env=env, capture_output=True)
    assert sick.returncode != 0, "a stopped daemon is not healthy"
    print(f"the image answers: {answer!r}")


def main(path):
    image = Image(path)
    print(f"the layout is valid, {os.path.getsize(path) / 1e6:.0f} MB")
    if shutil.which("skopeo"):
        subprocess.run(["skopeo", "inspect", f"oci-archive:{path}"], check=True, stdout=subprocess.DEVNULL)
        print("skopeo reads it")
    if os.geteuid():
        print("Skipped its use: that needs root")
        return
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "root"
        root.mkdir()
        os.chmod(folder, 0o755)
        image.unpack(root)
        use(image, root)


if __name__ == "__main__":
    main(sys.argv[1])
