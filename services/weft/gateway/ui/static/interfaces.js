// The gateway's OpenAPI document as a page.

import { address, read, watch } from "./api.js";
import { folded, grid, h } from "./dom.js";

export async function show(main, _, signal) {
  watch([]);
  const { paths, info, components } = await read("openapi.json", { signal });
  const resolve = (value = {}) => (value.$ref ? components[value.$ref.split("/")[2]][value.$ref.split("/")[3]] : value);
  const kind = (schema) => {
    const one = resolve(schema);
    if (one.items) return `array of ${kind(one.items)}`;
    return one.enum ? one.enum.map((value) => JSON.stringify(value)).join(", ") : one.anyOf ? one.anyOf.map(kind).join(" or ") : [one.type ?? "any"].join(" or ");
  };
  const fields = (title, rows) => {
    const table = grid(title);
    table.fill(rows);
    return rows.length > 0 && [h("h3", {}, title), table.node];
  };
  const content = (title, part) => Object.entries(resolve(part).content ?? {}).map(([media, { schema, example, examples = {} }]) => {
    const { properties = {}, required = [] } = resolve(schema);
    return [fields(`${title}: ${media}`, Object.entries(properties).map(([name, value]) =>
      ({ field: name, type: kind(value), required: required.includes(name), description: resolve(value).description ?? "" }))),
      Object.entries(example ? { "": { value: example } } : examples).map(([name, one]) => folded(`Example ${name}`, h("pre", {}, JSON.stringify(one.value, null, 2))))];
  });
  const operation = ([path, method, { summary, parameters = [], requestBody, responses }]) => folded(
    [h("b.method", {}, method.toUpperCase()), h("code", {}, path), " ", h("small", {}, summary)],
    fields("Parameters", parameters.map(({ name, in: where, schema, description = "" }) => ({ name, in: where, type: kind(schema), description }))),
    requestBody && content("Body", requestBody), content("Answer", responses["200"]), h("p.note", {}, `Statuses: ${Object.keys(responses).join(", ")}`));
  const all = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, one]) => [path, method, one]));
  const family = ([path]) => (/^\/v2/.test(path) ? "V2, the Open Inference Protocol" : /messages/.test(path) ? "Anthropic" : /^\/v1/.test(path) ? "OpenAI" : "Others");
  main.replaceChildren(h("div.sheet", {}, h("h1", {}, "API"), h("p", {}, info.description, " ", h("a", { href: address("openapi.json") }, "openapi.json")),
    Object.entries(Object.groupBy(all, family)).map(([title, those]) => h("section", {}, h("h2", {}, title), those.map(operation)))));
}
