"""An agent program that speaks OpenAI's interface with the standard library alone, and can misbehave."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def chat(messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def attempt(action):
    try:
        return bool(action()) and "did it"
    except (OSError, urllib.error.HTTPError) as error:
        return type(error).__name__


task = sys.stdin.read()
mode, _, rest = os.environ.get("MODE", "").partition(":")
applies = not rest or rest in task
if mode == "silent" and applies:
    sys.exit()
messages = [{"role": "user", "content": task}]
for turn in range(2):
    messages.append(chat(messages, temperature=0.2, **({"stop": ["##"]} if mode == "stop" else {})))
    if mode == "crash" and applies:
        raise RuntimeError("the agent lost its way")
    if mode == "hang" and applies:
        subprocess.Popen(["sleep", "61.25"], start_new_session=True)
        time.sleep(60)
    if mode == "flood" and applies:
        while True:
            print("x" * 100_000)
    if mode == "edit" and not turn:
        messages[0]["content"] = "something else"
    messages.append({"role": "user", "content": "again" if turn else " again "})
if mode == "reach":
    other = os.environ["OPENAI_BASE_URL"].replace("/v1", "x/v1")
    outside = Path(os.environ["OUTSIDE"])
    port = int(os.environ["PORT"])
    print(
        attempt(outside.read_text),
        attempt(lambda: outside.write_text("mine")),
        attempt(lambda: socket.create_connection(("127.0.0.1", port), 1)),
        attempt(lambda: urllib.request.urlopen(other + "/models", timeout=1)),
        attempt(lambda: chat(messages, n=2)),
        [name for name in os.environ if "SECRET" in name],
    )
else:
    print(messages[-2]["content"])
