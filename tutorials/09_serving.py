"""Serving and clients: one server for programs, OpenAI's clients and anything that speaks HTTP.

In a terminal the server is `sgl serve`. Here this script starts it as a process of its own, asks it in three ways, and
ends it.
"""

import atexit
import json
import subprocess
import sys
import urllib.error
import urllib.request

import sgl

# ## Start
#
# Port 0 takes a free one. The line `sgl is ready: MODEL on URL` comes on standard error once a first token was
# generated; before that, `/health` answers 503.

server = subprocess.Popen(
    [sys.executable, "-m", "sgl.cli", "serve", "--port", "0", "--no-log-requests"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
)
atexit.register(server.kill)  # whatever happens here, it does not outlive this script
url = next(line.split(" on ")[1].strip() for line in server.stderr if line.startswith("sgl is ready"))


opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # straight to this machine


def call(path, body=None):
    """The answer to a request, as Python values."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


print("health:", call("/health"))
print("models:", [model["id"] for model in call("/v1/models")["data"]])

# ## As OpenAI's API
#
# Any client of OpenAI's works with `base_url=url + "/v1"`. This is the request that it would send. Constraints are the
# API's own (`response_format`), or the names that SGLang and vLLM share (`regex`, `json_schema`, `ebnf`).

answer = call(
    "/v1/chat/completions",
    {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Pick a number between 10 and 99."}],
        "regex": "[1-9][0-9]",
        "temperature": 0,
    },
)
number = answer["choices"][0]["message"]["content"]
print("number:", number, "usage:", answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
assert 10 <= int(number) <= 99

# ## As a program
#
# `sgl.RemoteEngine(url)` is a backend like the engine in the process: any program runs there, with the same values. The
# graph is what travels, so a program without Python decisions is one request, whatever it forks and selects.


@sgl.function
def sentiment(s, review):
    s += "Review: The cake was delicious.\nLabel: positive\nReview: The bus came too late.\nLabel: negative\n"
    s += f"Review: {review}\nLabel:" + sgl.select("label", choices=[" positive", " negative"])


with sgl.RemoteEngine(url) as remote:
    state = sentiment.run("What a lovely evening!", backend=remote)
    print("remote:", state["label"], state.probabilities("label"))
    assert state["label"] in (" positive", " negative")

# ## As a decision
#
# `/v1/decisions` asks questions about one input and answers with probabilities. (`/v1/score` is the same for labels
# that you give as tokens, which is what a reranker asks for.)

decided = call(
    "/v1/decisions",
    {
        "input": "The soup was cold and the waiter rude.",
        "questions": [{"type": "choice", "id": "about", "options": ["food", "sport"], "question": "What is it about?"}],
    },
)
print("decisions:", json.dumps(decided, indent=1)[:400])

# ## Other clients
#
# The same server speaks Anthropic's and Ollama's API. `GET /` is a playground in the browser, and `sgl chat --url URL`
# a talk in the terminal.

with opener.open(url, timeout=60) as answer:
    print("playground:", answer.headers["Content-Type"])

# ## What is wrong is told
#
# A field that there is not is refused, with the nearest one.

try:
    call("/v1/completions", {"model": "smollm2-135m", "prompt": "Hello", "max_token": 4})
except urllib.error.HTTPError as error:
    told = json.load(error)["error"]
    print("refused with", error.code, told["message"])

# ## Stop
#
# SIGTERM lets running requests end (30 s at most), and answers new ones 503.

server.terminate()
server.stderr.close()
print("ended with", server.wait(timeout=60))

# Keys, tenants, limits, metrics and what happens to slow or broken clients: [the server](../sgl/server/README.md). To
# run it for others: [deploy](../deploy/README.md). Next: [speculation](10_speculation.py).
