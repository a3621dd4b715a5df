// The chat: one conversation, streamed; what the model reasons is shown apart.

const chat = {
  messages: [],
  job: new Job(byId("chat-send"), byId("chat-stop-button"), byId("chat-status"), byId("chat-log")),

  turn(role, text) {
    const body = make("div", { class: "body" }, text);
    const turn = make("article", { class: `turn ${role}` }, make("h2", {}, role), body);
    byId("chat-log").append(turn);
    this.scroll();
    return { turn, body };
  },

  scroll() {
    const log = byId("chat-log");
    log.scrollTop = log.scrollHeight;
  },

  request() {
    const system = byId("chat-system").value;
    const stop = byId("chat-stop").value;
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: numberIn("chat-temperature"),
      top_p: numberIn("chat-top-p"),
      max_tokens: numberIn("chat-max-tokens"),
      seed: numberIn("chat-seed"),
      stop: stop || undefined,
      stream: true,
      stream_options: { include_usage: true },
    };
  },

  async send() {
    const text = byId("chat-input").value.trim();
    if (!text || this.job.controller !== null) {
      return;
    }
    byId("chat-input").value = "";
    this.messages.push({ role: "user", content: text });
    const asked = this.turn("user", text);
    const shown = this.turn("assistant", "");
    const answer = { content: "", reasoning: "" };
    await this.job.run((signal) => this.stream(shown, answer, signal));
    if (answer.content || answer.reasoning) {
      this.messages.push({ role: "assistant", content: answer.content });
    } else {
      this.messages.pop();
      shown.turn.remove();
      asked.turn.remove();
      byId("chat-input").value = text;
    }
    byId("chat-input").focus();
  },

  async stream(shown, answer, signal) {
    const start = performance.now();
    const response = await ask("/v1/chat/completions", this.request(), signal);
    let reasoning = null;
    let ending = "";
    for await (const { data } of eventsOf(response)) {
      for (const choice of data.choices) {
        if (choice.delta.reasoning_content) {
          reasoning ||= this.reasoning(shown);
          reasoning.append(choice.delta.reasoning_content);
          answer.reasoning += choice.delta.reasoning_content;
        }
        if (choice.delta.content) {
          shown.body.append(choice.delta.content);
          answer.content += choice.delta.content;
        }
        ending = choice.finish_reason === "length" ? "; ended at the most tokens" : ending;
      }
      if (data.usage) {
        this.job.show(usageText(data.usage, (performance.now() - start) / 1000) + ending);
      }
      this.scroll();
    }
  },

  reasoning(shown) {
    const text = make("div", { class: "body note" });
    shown.body.before(make("details", { open: "", class: "box" }, make("summary", {}, "Reasoning"), text));
    return text;
  },

  reset() {
    this.job.abort();
    this.messages.length = 0;
    byId("chat-log").replaceChildren();
    this.job.show("");
    byId("chat-input").focus();
  },

  begin() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-new").addEventListener("click", () => this.reset());
  },
};
