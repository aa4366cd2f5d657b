"""A Hugging Face hub of one dataset on loopback: what its clients ask for when they list and read
files, over a folder, with answers that can fail."""

import json
from urllib.parse import parse_qs, unquote, urlsplit

from file_server import FileServer

DATASET = "owner/texts"


class HubServer(FileServer):
    """Serves the files of a folder as those of `hf://datasets/owner/texts`. `fault` is called for
    requests of files, as that of `FileServer`, and with the path "api" for all others."""

    def answer(self, request, method):
        place = urlsplit(request.path)
        name, query = unquote(place.path).lstrip("/"), parse_qs(place.query)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        files = f"datasets/{DATASET}/resolve/main/"
        if name.startswith(files):
            self._answer_file(request, method, name.removeprefix(files))
            return
        fault = self.fault(method, "api")
        if fault is not None:
            self._send(request, "GET", fault if isinstance(fault, int) else 503, b"{}")
            return
        dataset, _, rest = name.removeprefix("api/datasets/").partition(f"{DATASET}/")
        if dataset and dataset != DATASET:
            headers = {"X-Error-Code": "RepoNotFound"}
            self._send(request, "GET", 404, b"{}", headers)
            return
        self._send_json(request, self._find(rest, query, body))

    def _find(self, rest, query, body):
        """Return what the API says under the rest of its path."""
        action, _, path = rest.partition("/main")
        if action == "tree":
            return self._list(path.lstrip("/"), query.get("recursive") == ["true"])
        if action == "paths-info":
            given = parse_qs(body.decode())["paths"]
            return [self._describe(self.folder / each) for each in given]
        return {"id": DATASET, "sha": "0" * 40, "private": False, "tags": [], "siblings": []}

    def _list(self, path, recursive):
        top = self.folder / path
        if not top.is_dir():
            return None
        found = sorted(top.rglob("*") if recursive else top.iterdir())
        return [self._describe(each) for each in found]

    def _describe(self, path):
        of_file = {"type": "file", "size": path.stat().st_size}
        given = {"type": "directory"} if path.is_dir() else of_file
        return {"path": str(path.relative_to(self.folder)), "oid": "0" * 40, **given}

    def _send_json(self, request, content):
        status, headers = 200, {"Content-Type": "application/json"}
        if content is None:
            status, headers["X-Error-Code"] = 404, "EntryNotFound"
            content = {"error": "Entry not found"}
        self._send(request, "GET", status, json.dumps(content).encode(), headers)
