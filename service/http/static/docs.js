// The API's reference, made of the service's own schema: nothing is loaded from elsewhere.
import { $, api, element, problem } from "/api.js";

let schemas = {};

/** What a value may be, in words; objects that have a name are links to their fields. */
function kind(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const link = element("a", name);
    link.href = `#${name}`;
    return [link];
  }
  const forms = (schema.anyOf ?? schema.oneOf)?.filter((form) => form.type !== "null");
  if (forms) return forms.flatMap((form, place) => (place ? [" or ", ...kind(form)] : kind(form)));
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {})];
  return [schema.format === "binary" ? "file" : schema.type ?? "anything"];
}

function table(caption, rows) {
  const made = element("table");
  made.append(element("caption", caption));
  const head = element("tr");
  for (const title of ["name", "what", "left out"]) {
    const cell = element("th", title);
    cell.scope = "col";
    head.append(cell);
  }
  made.append(head);
  for (const { name, schema, required, description } of rows) {
    const row = element("tr");
    const what = element("td");
    what.append(...kind(schema), description ? `. ${description}` : "");
    const left = required ? "required" : schema.default === undefined || schema.default === null ? "" : JSON.stringify(schema.default);
    const title = element("th", name);
    title.scope = "row";
    row.append(title, what, element("td", left));
    made.append(row);
  }
  return made;
}

function fields(caption, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => ({
    name, schema: field, required: schema.required?.includes(name), description: field.description,
  }));
  return rows.length ? [table(caption, rows)] : [];
}

/** One call: its words, its parameters, the fields of its body. */
function call(method, path, about) {
  const made = element("section", undefined, "card");
  made.id = about.operationId;
  made.append(element("h2", `${method.toUpperCase()} ${path}`), element("p", about.description ?? about.summary ?? ""));
  const parameters = (about.parameters ?? []).map(({ name, schema, required, description }) => ({ name, schema, required, description }));
  if (parameters.length) made.append(table("Parameters", parameters));
  for (const [media, { schema }] of Object.entries(about.requestBody?.content ?? {})) {
    const body = schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
    made.append(...fields(`Body, ${media}`, body));
  }
  return made;
}

async function start() {
  const { paths, components } = await (await api("/openapi.json")).json();
  schemas = components?.schemas ?? {};
  for (const [path, calls] of Object.entries(paths)) {
    for (const [method, about] of Object.entries(calls)) {
      $("calls").append(call(method, path, about));
      const link = element("a", `${method.toUpperCase()} ${path}`);
      link.href = `#${about.operationId}`;
      const item = element("li");
      item.append(link);
      $("contents").append(item);
    }
  }
  const bodies = Object.entries(paths).flatMap(([, calls]) => Object.values(calls).flatMap((one) =>
    Object.values(one.requestBody?.content ?? {}).map(({ schema }) => schema.$ref?.split("/").at(-1))));
  for (const [name, schema] of Object.entries(schemas)) {
    if (bodies.includes(name)) continue; // its fields stand with the call
    const made = element("section", undefined, "card");
    made.id = name;
    made.append(element("h2", name), element("p", schema.description ?? ""), ...fields("Fields", schema));
    $("calls").append(made);
  }
}

start().catch((error) => problem(error.message));
