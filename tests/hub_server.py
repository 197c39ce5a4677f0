"""A server that speaks the Hugging Face Hub's API as far as fetching models needs it: revisions, pages of lists of files, files that
are sent at once (small ones) or from another address (large ones, after a redirect), parts of files, tokens, and the ways in which
a hub or the network between fails."""
import hashlib
import http.server
import json
import threading
import urllib.parse

TOKEN = "hf_0123456789abcdefghijklmnopqrstuvwxyz"
LARGE = 4096  # bytes from which a file has its SHA-256 as its name, and is sent by the second address


def oid_of(data):
    return hashlib.sha256(data).hexdigest() if len(data) >= LARGE else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repository:
    def __init__(self, files, gated=False, private=False):
        self.files, self.gated, self.private = dict(files), gated, private
        self.sent = {}  # bytes that are sent in place of a file's
        self.commits = {}
        self.commit("main")

    def commit(self, branch):
        """The files as they are become a commit of the branch."""
        names = "".join(f"{path} {oid_of(data)}\n" for path, data in sorted(self.files.items()))
        sha = hashlib.sha1(names.encode()).hexdigest()
        self.commits[branch] = self.commits[sha] = sha
        return sha


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:  # the client has gone
            pass

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status, code, message):
        self.answer(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message)

    def send_bytes(self, data, **headers):
        """A file or a part of it; the hub's faults cut it."""
        hub = self.server.hub
        begin = 0
        if (wanted := self.headers.get("Range")) and hub.ranges:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(data):
                return self.answer(416, Content_Range=f"bytes */{len(data)}")
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if "Content-Range" in headers else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Accept-Ranges", "bytes" if hub.ranges else "none")
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return None
        rest = data[begin:]
        if hub.cuts:
            rest = rest[:hub.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(rest)
        return None

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server.hub, urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        hub.requests.append((self.server is hub.far, self.command, self.path, dict(self.headers)))
        if hub.busy:
            status, headers = hub.busy.pop(0)
            return self.answer(status, **headers)
        if self.server is hub.far:
            data = hub.blobs.get(path.removeprefix("/blobs/"))
            return self.send_bytes(data) if data is not None else self.answer(403)
        return self.hub_get(hub, path, urllib.parse.parse_qs(url.query))

    def hub_get(self, hub, path, query):
        words = path.strip("/").split("/")
        api = words[:2] == ["api", "models"]
        words = words[2:] if api else words
        name = "/".join(words[:2])
        if name in hub.moved:
            return self.answer(307, Location=self.path.replace(name, hub.moved[name], 1))
        repository = hub.repositories.get(name)
        token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not token):
            return self.refuse(401 if not token else 404, "RepoNotFound", "Repository not found")
        if api and words[2] == "revision":
            sha = repository.commits.get("/".join(words[3:]))
            if sha is None:
                return self.refuse(404, "RevisionNotFound", "Invalid rev id")
            return self.answer(200, json.dumps({"id": name, "sha": sha, "siblings": [{"rfilename": p} for p in repository.files]}).encode())
        if api and words[2] == "tree":
            if words[3] not in repository.commits:
                return self.refuse(404, "RevisionNotFound", "Invalid rev id")
            return self.tree(hub, repository, query)
        sha, path = repository.commits.get(words[3]), "/".join(words[4:])
        if words[2] != "resolve" or sha is None or path not in repository.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        if repository.gated and not token:
            return self.refuse(401, "GatedRepo", "Access to this model is restricted")
        return self.resolve(hub, repository, sha, path)

    def tree(self, hub, repository, query):
        names = sorted(repository.files)
        begin = int(query.get("cursor", ["0"])[0])
        items, folders = [], set()
        for path in names[begin:begin + hub.page]:
            data = repository.files[path]
            item = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
            if len(data) >= LARGE:
                item["lfs"] = {"oid": oid_of(data), "size": len(data), "pointerSize": 135}
            else:
                item["oid"] = oid_of(data)
            if "/" in path and (folder := path.rsplit("/", 1)[0]) not in folders:
                folders.add(folder)
                items.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": folder})
            items.append(item)
        items += hub.extra_items
        headers = {}
        if begin + hub.page < len(names):
            headers["Link"] = f'<{hub.url}{urllib.parse.urlsplit(self.path).path}?recursive=true&cursor={begin + hub.page}>; rel="next"'
        self.answer(200, json.dumps(items).encode(), Content_Type="application/json", **headers)

    def resolve(self, hub, repository, sha, path):
        data = repository.files[path]
        sent = repository.sent.get(path, data)
        if len(data) < LARGE:
            return self.send_bytes(sent, ETag=f'"{oid_of(data)}"', X_Repo_Commit=sha)
        hub.blobs[oid_of(data)] = sent
        return self.answer(302, Location=f"{hub.far_url}/blobs/{oid_of(data)}?X-Signature=0123", X_Linked_Etag=f'"{oid_of(data)}"',
                           X_Linked_Size=str(len(data)), X_Repo_Commit=sha, ETag='"other"')


class Hub:
    """Two addresses: the hub's, and that from which it lets large files be fetched."""

    def __init__(self, **repositories):
        self.repositories = {name.replace("__", "/"): r for name, r in repositories.items()}
        self.requests, self.blobs, self.moved = [], {}, {}
        self.ranges, self.cuts, self.busy, self.page, self.extra_items = True, [], [], 3, []
        self.near, self.far = (http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2))
        for server in (self.near, self.far):
            server.hub, server.daemon_threads = self, True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url, self.far_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in (self.near, self.far))

    def close(self):
        for server in (self.near, self.far):
            server.shutdown()
            server.server_close()

    def gets(self, part):
        """The requests whose address contains this."""
        return [r for r in self.requests if part in r[2]]
