"""A stand-in for `sglang.launch_server` that starts in no time, for tests of server life.

`python fake_server.py --port PORT [--behaviour B]` answers /health, /get_server_info, /metrics, /flush_cache
and /set_internal_state as SGLang does. Behaviours: "dies" before it listens, "hangs" without listening,
"stubborn" ignores SIGTERM (as its children do), "forks" has a child in its own session and one that ignores
SIGTERM, "port-taken" dies the first time as if its port were taken, "crashes" on the second state read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    state: ClassVar[dict[str, Any]] = {"threshold": None, "resume_threshold": None, "dwell_steps": 1}
    reads = 0
    behaviour = ""

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer("")
        elif self.path == "/get_server_info":
            Handler.reads += 1
            if self.behaviour == "crashes" and Handler.reads == 2:
                print("RuntimeError: out of memory in decode", flush=True)
                os._exit(3)
            self.answer(json.dumps({"version": "fake", "internal_states": [{"specdec": self.state}]}))
        elif self.path == "/metrics":
            self.answer(
                "# HELP sglang:generation_tokens_total Tokens\n"
                'sglang:generation_tokens_total{rank="0"} 40.0\n'
                'sglang:generation_tokens_total{rank="1"} 2.0\n'
                'sglang:prompt_tokens_total{rank="0"} 999.0\n'
            )
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
        if self.path.startswith("/flush_cache"):
            self.answer("Cache flushed.\n")
            return
        wanted = body["server_args"]["specdec"]
        refused = wanted["threshold"] is not None and wanted["threshold"] < 0
        if refused:
            Handler.state = {**self.state, "refused_change": "the threshold must be 0 or more"}
        else:
            Handler.state = {**self.state, **wanted}
        self.answer(json.dumps([not refused]))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--behaviour", default="")
    parser.add_argument("--marker", type=Path, help="file that tells a second start from a first one")
    options = parser.parse_args()
    Handler.behaviour = options.behaviour
    print("fake server, pid", os.getpid(), "run", os.environ.get("FAKE_RUN"), flush=True)

    if options.behaviour == "dies":
        print("ValueError: the draft model does not fit", flush=True)
        sys.exit(7)
    if options.behaviour == "hangs":
        print("loading weights", flush=True)
        time.sleep(600)
    if options.behaviour == "port-taken" and not options.marker.exists():
        options.marker.touch()
        print("[Errno 98] error while attempting to bind: address already in use", flush=True)
        sys.exit(1)
    if options.behaviour in ("stubborn", "forks"):
        subprocess.Popen([sys.executable, "-c", SLEEPER])
        subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    if options.behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
