// A small validator of JSON schemas, so that the mark behind an answer is a check and not a promise. It runs here, in
// the reader's browser. Keywords that it does not know are named, never passed over in silence.

const KNOWN = new Set([
  "$schema", "$id", "$defs", "$ref", "$comment", "definitions", "title", "description", "default", "examples",
  "type", "enum", "const", "properties", "required", "additionalProperties", "minProperties", "maxProperties",
  "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum",
  "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf",
]);

const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  integer: (value) => typeof value === "number" && Number.isInteger(value),
  array: Array.isArray,
  object: (value) => typeof value === "object" && value !== null && !Array.isArray(value),
};

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const has = (object, name) => Object.prototype.hasOwnProperty.call(object, name);

class Validator {
  constructor(root) {
    this.root = root;
    this.unknown = new Set();
  }

  /** What is wrong with `value`, as texts that begin with a JSON pointer; empty for a valid one. */
  faults(value, schema = this.root, at = "") {
    if (schema === true || schema === undefined) {
      return [];
    }
    if (schema === false) {
      return [`${at || "/"}: nothing is allowed here`];
    }
    Object.keys(schema).filter((name) => !KNOWN.has(name)).forEach((name) => this.unknown.add(name));
    const found = [];
    const want = (holds, what) => holds || found.push(`${at || "/"}: ${what}`);
    if (schema.$ref !== undefined) {
      found.push(...this.faults(value, this.target(schema.$ref), at));
    }
    if (schema.type !== undefined) {
      want([].concat(schema.type).some((name) => TYPES[name](value)), `expected ${schema.type}`);
    }
    want(schema.enum === undefined || schema.enum.some((each) => same(each, value)), "none of enum");
    want(!has(schema, "const") || same(schema.const, value), "not const");
    this.combined(value, schema, at, found, want);
    if (typeof value === "number") {
      want(!(value < schema.minimum), "below minimum");
      want(!(value > schema.maximum), "above maximum");
      want(!(value <= schema.exclusiveMinimum), "below exclusiveMinimum");
      want(!(value >= schema.exclusiveMaximum), "above exclusiveMaximum");
    } else if (typeof value === "string") {
      const length = [...value].length;
      want(!(length < schema.minLength) && !(length > schema.maxLength), `has ${length} characters`);
      want(schema.pattern === undefined || new RegExp(schema.pattern, "u").test(value), "does not match pattern");
    } else if (Array.isArray(value)) {
      want(!(value.length < schema.minItems) && !(value.length > schema.maxItems), `has ${value.length} items`);
      const first = schema.prefixItems || [];
      value.forEach((each, index) => {
        const of = index < first.length ? first[index] : schema.items;
        found.push(...this.faults(each, of, `${at}/${index}`));
      });
    } else if (TYPES.object(value)) {
      this.members(value, schema, at, found, want);
    }
    return found;
  }

  combined(value, schema, at, found, want) {
    const fits = (each) => this.faults(value, each, at).length === 0;
    (schema.allOf || []).forEach((each) => found.push(...this.faults(value, each, at)));
    want(schema.anyOf === undefined || schema.anyOf.some(fits), "fits none of anyOf");
    want(schema.oneOf === undefined || schema.oneOf.filter(fits).length === 1, "does not fit one of oneOf");
  }

  members(value, schema, at, found, want) {
    const names = Object.keys(value);
    const known = schema.properties || {};
    want(!(names.length < schema.minProperties) && !(names.length > schema.maxProperties), `has ${names.length} members`);
    (schema.required || []).forEach((name) => want(has(value, name), `lacks ${JSON.stringify(name)}`));
    for (const name of names) {
      const of = has(known, name) ? known[name] : schema.additionalProperties;
      found.push(...this.faults(value[name], of, `${at}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`));
    }
  }

  target(reference) {
    let found = this.root;
    for (const part of String(reference).split("/").slice(1)) {
      found = found[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")];
    }
    return found;
  }
}
