"use strict";
// What the tabs share: elements, requests with the key, and server-sent events. No text of a user or a model is ever
// markup: it gets into the page as text nodes alone, and the page's policy forbids the rest.

const byId = (id) => document.getElementById(id);

/** An element with attributes; children are elements or text. */
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const KEY = "sgl-api-key";

/** sessionStorage may be closed to a page: then the key lives as long as the page. */
const keyStore = {
  value: "",
  read() {
    try {
      return sessionStorage.getItem(KEY) || this.value;
    } catch {
      return this.value;
    }
  },
  write(value) {
    this.value = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      console.info("the key is kept in memory alone");
    }
  },
};

/** A request to this server; an error has the server's own words. */
async function ask(path, body, signal) {
  const headers = {};
  if (keyStore.read()) {
    headers.Authorization = `Bearer ${keyStore.read()}`;
  }
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  if (response.ok) {
    return response;
  }
  if (response.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  throw new Error(await said(response));
}

async function said(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text.slice(0, 200)}`;
  }
}

/** The events of a stream, as {name, data}; `[DONE]` is its end. An error among them is thrown. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const event = parsed(frame);
        if (event === null) {
          continue;
        }
        if (event.data.error && event.name !== "failed") {
          throw new Error(event.data.error.message);
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => console.info("the stream was closed already"));
  }
}

function parsed(frame) {
  let name = "";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) {
      name = line.slice(7);
    } else if (line.startsWith("data: ")) {
      data.push(line.slice(6));
    }
  }
  const text = data.join("\n");
  return text === "" || text === "[DONE]" ? null : { name, data: JSON.parse(text) };
}

/** A form that does one thing at a time and can be stopped. `work(signal)` runs; `show(text, isError)` tells. */
class Job {
  constructor(start, stop, status, busy) {
    Object.assign(this, { start, stop, status, busy, controller: null });
    stop.addEventListener("click", () => this.abort());
  }

  abort() {
    if (this.controller !== null) {
      this.controller.abort();
    }
  }

  show(text, isError = false) {
    this.status.textContent = text;
    this.status.classList.toggle("error", isError);
  }

  /** Whether it came to its end. */
  async run(work) {
    if (this.controller !== null) {
      return false;
    }
    const controller = new AbortController();
    this.controller = controller;
    this.toggle(true);
    this.show("running");
    try {
      await work(controller.signal);
      return true;
    } catch (error) {
      this.show(controller.signal.aborted ? "stopped" : error.message, !controller.signal.aborted);
      return false;
    } finally {
      this.controller = null;
      this.toggle(false);
    }
  }

  toggle(isBusy) {
    this.start.disabled = isBusy;
    this.stop.disabled = !isBusy;
    this.busy.setAttribute("aria-busy", String(isBusy));
  }
}

/** The number in a field; undefined where it is empty or none. */
function numberIn(id) {
  const field = byId(id);
  return field.value === "" || Number.isNaN(field.valueAsNumber) ? undefined : field.valueAsNumber;
}

function usageText(usage, seconds) {
  const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
  const speed = seconds > 0 ? `, ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s` : "";
  return `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} generated${speed}`;
}
