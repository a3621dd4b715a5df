// JSON that fits a schema: the constrained answer streams, and is then checked against the schema once more.

const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 16 },
    age: { type: "integer", minimum: 1, maximum: 120 },
    likes: { type: "array", items: { enum: ["music", "chess", "food"] }, minItems: 1, maxItems: 2 },
  },
  required: ["name", "age", "likes"],
  additionalProperties: false,
};

const schemaTab = {
  job: new Job(byId("schema-run"), byId("schema-stop"), byId("schema-status"), byId("schema-output")),

  mark(text, isGood) {
    byId("schema-mark").textContent = text;
    byId("schema-mark").className = isGood ? "good" : "error";
  },

  async stream(signal) {
    this.mark("", true);
    byId("schema-output").replaceChildren();
    let schema;
    try {
      schema = JSON.parse(byId("schema-text").value);
    } catch (error) {
      throw new Error(`the schema is no JSON: ${error.message}`);
    }
    const start = performance.now();
    const body = {
      messages: [{ role: "user", content: byId("schema-prompt").value }],
      response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
      max_tokens: numberIn("schema-max-tokens"),
      temperature: 0,
      stream: true,
      stream_options: { include_usage: true },
    };
    let text = "";
    let ending = "";
    for await (const { data } of eventsOf(await ask("/v1/chat/completions", body, signal))) {
      for (const choice of data.choices) {
        const piece = choice.delta.content || "";
        text += piece;
        byId("schema-output").append(piece);
        ending = choice.finish_reason || ending;
      }
      if (data.usage) {
        this.job.show(usageText(data.usage, (performance.now() - start) / 1000));
      }
    }
    this.check(text, schema, ending);
  },

  check(text, schema, ending) {
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      this.mark(ending === "length" ? "✗ broken off: raise the most tokens" : `✗ no JSON: ${error.message}`, false);
      return;
    }
    const validator = new Validator(schema);
    let faults;
    try {
      faults = validator.faults(value);
    } catch (error) {
      this.mark(`the schema cannot be checked here: ${error.message}`, false);
      return;
    }
    const rest = validator.unknown.size ? ` (not checked here: ${[...validator.unknown].join(", ")})` : "";
    this.mark(faults.length ? `✗ ${faults.join("; ")}` : `✓ valid${rest}`, faults.length === 0);
  },

  begin() {
    byId("schema-text").value = JSON.stringify(SCHEMA, null, 2);
    byId("schema-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.job.run((signal) => this.stream(signal));
    });
  },
};
