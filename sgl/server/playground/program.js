// Programs: a graph is posted, its events are shown as they come. A branch is a box; forks stand side by side in the
// branch that made them. Text is coloured as it turns out: a prompt as cached or computed once a value tells, a value
// as generated or forced once it is whole.

/** One branch on the page. `since` is the prompt text after the last value on the way to here, whose end was at token
 * `anchor`: what a value's usage is spread over. */
class Branch {
  constructor(title, parent) {
    this.text = make("div", { class: "text" });
    this.box = make("section", { class: "branch", "aria-label": title }, make("h3", {}, title), this.text);
    this.parent = parent;
    this.anchor = parent ? parent.anchor : 0;
    this.since = parent ? [...parent.since] : [];
    this.values = new Map();
  }

  prompt(text) {
    const part = { text, cached: undefined, span: make("span", { class: "prompt" }, text) };
    this.since.push(part);
    this.text.append(part.span);
  }

  delta(event) {
    this.value(event).append(event.text);
  }

  value(event) {
    if (!this.values.has(event.node)) {
      const span = make("span", { class: "value generated", "data-name": event.name });
      this.values.set(event.node, span);
      this.text.append(span);
    }
    return this.values.get(event.node);
  }

  /** The option of a select has come as text of the branch: it goes from there, to be shown as the value. */
  take(option) {
    if (!this.since.map((part) => part.text).join("").endsWith(option)) {
      return;
    }
    for (let left = option.length; left > 0;) {
      const part = this.since.at(-1);
      const kept = part.text.slice(0, Math.max(0, part.text.length - left));
      left -= part.text.length - kept.length;
      part.text = kept;
      part.span.textContent = kept;
      if (kept === "") {
        this.since.pop();
      }
    }
  }

  /** A value is whole: what was cached of the prompt before it is known. */
  settle(event) {
    const usage = { prompt_tokens: 0, cached_tokens: 0, scored_tokens: 0, ...event.usage };
    const prompt = usage.prompt_tokens - usage.scored_tokens;
    const chars = this.since.reduce((sum, part) => sum + part.text.length, 0);
    const share = prompt > this.anchor ? (usage.cached_tokens - this.anchor) / (prompt - this.anchor) : 0;
    let left = Math.round(chars * Math.min(1, Math.max(0, share)));
    for (const part of this.since) {
      const cached = Math.min(left, part.text.length);
      left -= cached;
      // Siblings find what the first of them computed: the text before a fork is as cached as for the least lucky.
      part.cached = Math.min(part.cached ?? Infinity, cached);
      part.span.className = "";
      part.span.replaceChildren(
        make("span", { class: "cached" }, part.text.slice(0, part.cached)),
        make("span", { class: "prompt" }, part.text.slice(part.cached)),
      );
    }
    this.since = [];
    this.anchor = prompt + (event.token_ids || []).length;
  }
}

/** The pieces of a value, as [text, is forced]; `texts` are those of its tokens up to each of `ends`. */
function piecesOf(value, ends, texts) {
  const pieces = [];
  let start = 0;
  ends.forEach(({ forced }, index) => {
    const end = index === ends.length - 1 ? value.length : Math.min(texts[index].length, value.length);
    if (end > start) {
      pieces.push([value.slice(start, end), forced]);
      start = end;
    }
  });
  return pieces;
}

/** Where runs of forced and of drawn tokens end. */
function runEnds(event) {
  const total = event.token_ids.length;
  const ends = [];
  let at = 0;
  for (const [index, number] of event.forced || []) {
    if (index > at) {
      ends.push({ end: index, forced: false });
    }
    ends.push({ end: index + number, forced: true });
    at = index + number;
  }
  if (at < total) {
    ends.push({ end: total, forced: false });
  }
  return ends;
}

class ProgramRun {
  constructor(graph, output) {
    this.output = output;
    this.parents = new Map();
    for (const node of graph.nodes || []) {
      if (node.type === "fork") {
        node.children.forEach((child) => this.parents.set(child, { parent: node.branch || 0, node }));
      }
    }
    this.branches = new Map();
    output.replaceChildren();
  }

  branch(number) {
    if (!this.branches.has(number)) {
      const place = this.parents.get(number);
      if (place) {
        this.fork(place.node, this.branch(place.parent));
      } else {
        this.open(number, null, this.output);
      }
    }
    return this.branches.get(number);
  }

  open(number, parent, place) {
    const branch = new Branch(number === 0 ? "main" : `branch ${number}`, parent);
    this.branches.set(number, branch);
    place.append(branch.box);
  }

  /** All branches of a fork at once, side by side in their order. */
  fork(node, parent) {
    const row = make("div", { class: "branches" });
    parent.text.append(row);
    node.children.forEach((child) => this.open(child, parent, row));
  }

  async take({ type, ...event }, signal) {
    if (type === "text") {
      this.branch(event.branch).prompt(event.text);
    } else if (type === "delta") {
      this.branch(event.branch).delta(event);
    } else if (type === "value") {
      await this.settle(event, signal);
    } else if (type === "failed") {
      throw new Error(event.error.message || "the program failed");
    }
  }

  async settle(event, signal) {
    const branch = this.branch(event.branch);
    const isSelect = event.choices && event.choices.length;
    if (isSelect) {
      branch.take(event.value);
    }
    const span = branch.value(event);
    branch.settle(event);
    span.title = `${event.name}: ended by ${event.finish || "stop"}`;
    if (isSelect) {
      span.className = "value select";
      span.replaceChildren(event.value);
      span.after(counts(event), bars(event.choices));
      return;
    }
    span.className = "value";
    span.after(counts(event));
    const pieces = await this.pieces(event, signal);
    span.replaceChildren(
      ...pieces.map(([text, forced]) => make("span", { class: forced ? "forced" : "generated" }, text)),
    );
  }

  async pieces(event, signal) {
    const ends = runEnds({ ...event, token_ids: event.token_ids || [] });
    if (ends.length < 2) {
      return [[event.value, ends.length === 1 && ends[0].forced]];
    }
    const tokens = ends.map(({ end }) => event.token_ids.slice(0, end));
    const response = await ask("/detokenize", { tokens }, signal);
    return piecesOf(event.value, ends, (await response.json()).text);
  }
}

function counts(event) {
  const usage = event.usage || {};
  const number = (name) => usage[name] || 0;
  const parts = [
    `${number("cached_tokens")} cached`,
    `${number("prompt_tokens") - number("cached_tokens")} computed`,
    `${number("completion_tokens") - number("forced_tokens")} generated`,
    `${number("forced_tokens")} forced`,
  ];
  const time = event.latency_s ? `, ${Math.round(event.latency_s * 1000)} ms` : "";
  return make("span", { class: "counts" }, `${event.name}: ${parts.join(", ")}${time}`);
}

/** The options of a select with their probabilities; each is [choice, ids, logprobs, score, probability, ...]. */
function bars(choices) {
  const list = make("ul", { class: "bars", "aria-label": "Probabilities" });
  for (const choice of [...choices].sort((one, other) => other[4] - one[4])) {
    const share = make("i");
    share.style.width = `${100 * choice[4]}%`;
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, share);
    list.append(make("li", {}, make("span", {}, choice[0]), bar, make("span", {}, `${(100 * choice[4]).toFixed(1)} %`)));
  }
  return list;
}

const program = {
  examples: JSON.parse(byId("examples").textContent),
  job: new Job(byId("program-run"), byId("program-stop"), byId("program-status"), byId("program-output")),

  show(index) {
    const example = this.examples[index];
    byId("program-about").textContent = example.about;
    byId("program-source").textContent = example.source;
    byId("program-graph").value = JSON.stringify(example.program, null, 1);
    byId("program-bindings").replaceChildren(
      ...Object.entries(example.bindings).map(([name, value]) => {
        const field = make("textarea", { rows: "2", "data-name": name }, value);
        return make("label", {}, name, field);
      }),
    );
  },

  bindings() {
    const fields = byId("program-bindings").querySelectorAll("[data-name]");
    return Object.fromEntries([...fields].map((field) => [field.dataset.name, field.value]));
  },

  async stream(signal) {
    let posted;
    try {
      posted = JSON.parse(byId("program-graph").value);
    } catch (error) {
      throw new Error(`the graph is no JSON: ${error.message}`);
    }
    const start = performance.now();
    const body = { program: posted, bindings: this.bindings(), stream: true };
    const response = await ask("/v1/programs", body, signal);
    const run = new ProgramRun(posted.graph || {}, byId("program-output"));
    const total = { prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0, forced_tokens: 0 };
    for await (const { data } of eventsOf(response)) {
      await run.take(data, signal);
      if (data.type === "done") {
        Object.assign(total, data.usage);
      }
    }
    const seconds = ((performance.now() - start) / 1000).toFixed(2);
    this.job.show(
      `done in ${seconds} s: ${total.prompt_tokens} prompt tokens, ${total.cached_tokens} of them cached; ` +
        `${total.completion_tokens} generated, ${total.forced_tokens} of them forced`,
    );
  },

  begin() {
    const select = byId("program-example");
    select.append(...this.examples.map(({ title }, index) => make("option", { value: String(index) }, title)));
    select.addEventListener("change", () => this.show(Number(select.value)));
    this.show(0);
    byId("program-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.job.run((signal) => this.stream(signal));
    });
  },
};
