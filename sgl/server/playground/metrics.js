// Live metrics: `/metrics` once a second while the tab is shown; rates are differences of its counters.

const READ_MS = 1000;
const KEPT = 60;

/** Each: title, the figure from two readings (NaN where there is none yet), and how it is written. */
const FIGURES = [
  ["Generated tokens per second", (now, before) => now.rate(before, "vllm:generation_tokens_total"), whole],
  ["Prompt tokens per second", (now, before) => now.rate(before, "vllm:prompt_tokens_total"), whole],
  ["Running sequences", (now) => now.value("vllm:num_requests_running"), whole],
  ["Waiting sequences", (now) => now.value("vllm:num_requests_waiting"), whole],
  ["Cache hit rate", (now) => now.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), percent],
  ["Pages used", (now) => now.value("vllm:kv_cache_usage_perc"), percent],
];

function whole(value) {
  return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
}

function percent(value) {
  return `${(100 * value).toFixed(1)} %`;
}

/** One reading of Prometheus' text format. */
class Reading {
  constructor(text) {
    this.time = performance.now();
    this.values = new Map();
    for (const line of text.split("\n")) {
      const found = /^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)/.exec(line);
      if (found) {
        this.values.set(found[1], Number(found[2]));
      }
    }
  }

  value(name) {
    return this.values.get(name) ?? NaN;
  }

  rate(before, name) {
    return before ? (1000 * (this.value(name) - before.value(name))) / (this.time - before.time) : NaN;
  }

  share(part, all) {
    return this.value(part) / this.value(all);
  }
}

/** A figure with the line of its last minute. */
class Card {
  constructor([title, figure, text]) {
    Object.assign(this, { figure, text, points: [] });
    this.number = make("strong", {}, "–");
    this.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    drawing.setAttribute("viewBox", `0 0 ${KEPT - 1} 20`);
    drawing.setAttribute("preserveAspectRatio", "none");
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `${title}, last minute`);
    drawing.append(this.line);
    this.box = make("article", { class: "card" }, make("h2", {}, title), this.number, drawing);
  }

  add(now, before) {
    const value = this.figure(now, before);
    this.number.textContent = Number.isFinite(value) ? this.text(value) : "–";
    this.points.push(Number.isFinite(value) ? value : 0);
    this.points = this.points.slice(-KEPT);
    const top = Math.max(...this.points, 1e-9);
    const left = KEPT - this.points.length;
    const places = this.points.map((point, index) => `${left + index},${19 - (18 * point) / top}`);
    this.line.setAttribute("points", places.join(" "));
  }
}

const metrics = {
  cards: FIGURES.map((figure) => new Card(figure)),
  before: null,
  timer: null,

  async read() {
    try {
      const response = await ask("/metrics");
      const now = new Reading(await response.text());
      this.cards.forEach((card) => card.add(now, this.before));
      this.before = now;
      this.tell("Read once a second while this is shown.", false);
    } catch (error) {
      this.tell(error.message, true);
    }
  },

  tell(text, isError) {
    const status = byId("metrics-status");
    if (status.textContent !== text) {
      status.textContent = text;
    }
    status.classList.toggle("error", isError);
  },

  /** Read on, or rest: `isShown` is whether the tab is. */
  watch(isShown) {
    clearTimeout(this.timer);
    this.timer = null;
    if (isShown) {
      const next = async () => {
        this.timer = setTimeout(next, READ_MS);
        await this.read();
      };
      next();
    } else {
      this.before = null;
    }
  },

  begin() {
    byId("metrics-cards").replaceChildren(...this.cards.map((card) => card.box));
  },
};
