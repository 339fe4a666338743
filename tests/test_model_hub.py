"""Models from the Hub, as a stand-in on this machine serves them; HF_ENDPOINT is read when huggingface_hub is imported, so each run is a process."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest
from test_model_source import CONFIG, write_folder

COMMIT, MOVED = "c0ffee" + "0" * 34, "decade" + "0" * 34
RUN = """
import json, shutil, sys
from pathlib import Path
from mesp_mlx.errors import UserError
from mesp_mlx.model import source
free = int(sys.argv[4])
if free >= 0:
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**12, 0, free)
notes = []
try:
    found = source.resolve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], notes.append)
    print(json.dumps({"folder": str(found.folder), "name": found.name, "converted": found.converted, "notes": notes}))
except UserError as error:
    print(json.dumps({"error": str(error), "notes": notes}))
"""


class Hub:
    """Serves models (name: {file: bytes}) the way the Hub's API does; `asked` lists the paths that were asked for."""

    def __init__(self):
        self.dense, self.models, self.gated, self.cut, self.broken, self.down, self.asked = {}, {}, set(), set(), set(), False, []
        self.main, self.moves_after = COMMIT, None  # main moves when this much of a path has been asked for
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def log_message(self, *_):
                pass

            def answer(self, body):
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
                hub.asked.append(f"{self.command} {path}")
                status, headers, content = hub.reply(path)
                if hub.moves_after and path.endswith(hub.moves_after):
                    hub.main = MOVED
                self.send_response(status)
                for name, value in {"Content-Length": len(content), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                if not body:
                    return
                if path.rsplit("/", 1)[-1] in hub.cut:
                    hub.broken.add(path)  # what the client tries next
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(content)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path):
        if self.down or path in self.broken:
            return 503, {}, b""
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
        files = self.models[name]
        if is_api and rest[:1] == ["tree"]:
            return self.json([{"type": "file", "path": file, "size": len(data), "oid": self.tag(data)} for file, data in files.items()])
        if is_api:
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return self.json({"id": name, "sha": self.at(rest[-1] if rest else "main"), "siblings": siblings})
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted"}, b""
        file = "/".join(rest[2:])
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"X-Repo-Commit": self.at(rest[1]), "ETag": f'"{self.tag(files[file])}"', "Accept-Ranges": "bytes"}, files[file]

    def at(self, revision):
        return self.main if revision == "main" else revision

    @staticmethod
    def json(value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    @staticmethod
    def tag(data):
        return hashlib.sha1(data).hexdigest()

    def fetched(self):
        """Names of the files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.asked if path.startswith("GET") and "/resolve/" in path}


@pytest.fixture
def hub(tmp_path):
    folder = write_folder(tmp_path / "files")
    hub = Hub()
    hub.dense = {file.name: file.read_bytes() for file in folder.iterdir()} | {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
        "chat_template.jinja": b"x",
        "spiece.model": b"m",
        "additional_chat_templates/tool_use.jinja": b"t",
    }
    unused = {
        "README.md": b"#",
        "pytorch_model.bin": b"x" * 9,
        "consolidated.safetensors": b"y",
        "onnx/model.safetensors": b"z",
        "original/tokenizer.model": b"",
    }
    hub.models["org/Tiny"] = hub.dense | unused
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def run(tmp_path, hub):
    def call(model, quantize="4", free=-1, **environment):
        names = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
        kept = {name: value for name, value in os.environ.items() if name not in names}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", RUN, model, str(tmp_path / "cache"), quantize, str(free)],
            env=kept | own | environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def partials(tmp_path):
    return [file for folder in ("hf", "cache") for file in (tmp_path / folder).rglob("*") if file.suffix in (".incomplete", ".partial")]


def test_only_the_files_needed_are_fetched_once_and_quantised_once(tmp_path, hub, run):
    first = run("org/Tiny")
    assert first["name"] == "Tiny" and first["converted"] and hub.fetched() == set(hub.dense)
    folder = tmp_path / "cache" / "models" / os.path.basename(first["folder"])
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} == set(hub.dense)
    assert json.loads((tmp_path / "cache" / "models" / os.path.basename(first["folder"]) / "config.json").read_text())["quantization"]["bits"] == 4
    assert "Downloading org/Tiny" in first["notes"][0]
    hub.asked.clear()
    second = run("org/Tiny")
    assert second["folder"] == first["folder"] and not second["notes"] and not hub.fetched()


def test_what_is_downloaded_is_what_was_listed_though_main_moves(hub, run):
    hub.moves_after = "resolve/main/config.json"
    assert os.path.basename(run("org/Tiny", quantize="none")["folder"]) == COMMIT


def test_main_that_moves_before_the_config_is_there(hub, run):
    hub.moves_after = "api/models/org/Tiny"
    assert "changed on the Hub just now" in run("org/Tiny")["error"]
    assert run("org/Tiny")["converted"]


def test_without_a_network_what_was_fetched_before_is_used(tmp_path, hub, run):
    first = run("org/Tiny", quantize="none")
    assert not first["converted"] and os.path.basename(first["folder"]) == COMMIT
    hub.down = True
    assert run("org/Tiny", quantize="none")["folder"] == first["folder"]
    assert run("org/Tiny", HF_HUB_OFFLINE="1")["converted"]
    error = run("org/Other")["error"]
    assert "org/Other" in error and "can't be reached" in error
    assert "can't be reached" in run("org/Tiny", HF_HOME=str(tmp_path / "other"), HF_ENDPOINT="http://127.0.0.1:9")["error"]


def test_a_quantised_model_is_used_as_it_is(hub, run):
    hub.models["org/Tiny"]["config.json"] = json.dumps({**CONFIG, "quantization": {"group_size": 64, "bits": 4}}).encode()
    hub.models["mlx-community/Tiny-4bit"] = {}
    found = run("org/Tiny")
    assert not found["converted"] and os.path.basename(found["folder"]) == COMMIT and len(found["notes"]) == 1


def test_a_4_bit_twin_is_pointed_out_in_one_line(hub, run):
    hub.models["mlx-community/Tiny-4bit"] = {}
    notes = [note for note in run("org/Tiny")["notes"] if "mlx-community" in note]
    assert len(notes) == 1 and "--model mlx-community/Tiny-4bit" in notes[0]


def test_a_model_that_is_not_there_or_gated(hub, run):
    error = run("org/Nothing")["error"]
    assert "org/Nothing" in error and "no such model on the Hub" in error
    hub.gated.add("org/Tiny")
    error = run("org/Tiny")["error"]
    assert "gated" in error and "hf auth login" in error


def test_what_can_not_be_trained_is_refused_before_its_weights_are_fetched(hub, run):
    hub.models["org/Tiny"]["config.json"] = json.dumps({**CONFIG, "model_type": "bert"}).encode()
    assert "'bert'" in run("org/Tiny")["error"] and hub.fetched() == {"config.json"}
    hub.models["org/Torch"] = {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"x"}
    assert "no model*.safetensors" in run("org/Torch")["error"]
    hub.models["org/GGUF"] = {"tiny.Q4_0.gguf": b"GGUF"}
    assert "tiny.Q4_0.gguf" in run("org/GGUF")["error"] and hub.fetched() == {"config.json"}


def test_space_is_checked_before_the_weights_are_fetched(tmp_path, hub, run):
    download = sum(map(len, hub.dense.values()))
    for free, quantize in ((download - len(hub.dense["config.json"]) - 1, "none"), (download + 1000, "4")):
        error = run("org/Tiny", quantize, free)["error"]
        assert "MB free" in error and "HF_HOME" in error
    assert hub.fetched() == {"config.json"}
    assert "folder" in run("org/Tiny", "none", download)
    assert not partials(tmp_path)


def test_a_download_cut_short_leaves_nothing_and_can_be_run_again(tmp_path, hub, run):
    hub.cut.add("model.safetensors")
    error = run("org/Tiny")["error"]
    assert error.startswith("--model org/Tiny: downloading it from the Hub failed") and "Run the command again" in error and "\n" not in error
    assert not partials(tmp_path) and not (tmp_path / "cache" / "models").exists()
    hub.cut.clear()
    hub.broken.clear()
    assert run("org/Tiny")["converted"]
