// The gateway's OpenAPI document as a page.

import { address, read, watch } from "./api.js";
import { folded, h } from "./dom.js";

export async function show(main, _, signal) {
  watch([]);
  const document = await read("openapi.json", { signal });
  const resolve = (value) => (value?.$ref ? value.$ref.slice(2).split("/").reduce((at, name) => at?.[name], document) : value) ?? {};
  const groups = Map.groupBy(Object.entries(document.paths), ([path]) => `/${path.split("/")[1]}`);
  const json = (value) => h("pre", {}, JSON.stringify(value, null, 2));

  /** Fields of a schema, those of objects in it folded. */
  function fields(schema, depth = 0) {
    const found = resolve(schema);
    const items = resolve(found.items);
    if (found.properties && depth < 5) {
      return h("dl", {}, Object.entries(found.properties).map(([name, value]) => {
        const inner = resolve(value);
        const isNested = inner.properties || resolve(inner.items).properties;
        return [h("dt", {}, h("code", {}, name), found.required?.includes(name) && h("small", {}, " required")),
          h("dd", {}, kind(inner), " ", inner.description, isNested && folded("fields", fields(inner, depth + 1)))];
      }));
    }
    return items.properties ? fields(items, depth) : h("p", {}, kind(found));
  }
  function kind(schema) {
    const one = resolve(schema);
    const type = one.enum ? one.enum.map((value) => JSON.stringify(value)).join(" | ") : one.anyOf ? one.anyOf.map(kind).join(" or ") : [one.type ?? "any"].flat().join(" or ");
    return type === "array" ? `array of ${kind(one.items ?? {})}` : type;
  }
  const content = (part) => Object.entries(resolve(part).content ?? {}).map(([media, { schema, example, examples = {} }]) =>
    [h("h4", {}, media), schema && fields(schema), example && folded("Example", json(example)),
      Object.entries(examples).map(([name, one]) => folded(`Example: ${name}`, json(one.value)))]);
  const operation = (path, method, { summary, parameters = [], requestBody, responses }) => folded(
    [h("b.method", {}, method.toUpperCase()), h("code", {}, path), " ", h("small", {}, summary)],
    parameters.length > 0 && [h("h3", {}, "Parameters"), h("dl", {}, parameters.map((one) =>
      [h("dt", {}, h("code", {}, one.name), h("small", {}, ` ${one.in}`)), h("dd", {}, kind(one.schema), " ", one.description)]))],
    requestBody && [h("h3", {}, "Body"), content(requestBody)], h("h3", {}, "Answer"), content(responses["200"]),
    h("p.note", {}, `Errors: ${Object.keys(responses).filter((status) => status !== "200").join(", ")}`));
  main.replaceChildren(h("div.sheet.api", {}, h("h1", {}, "API"), h("p", {}, document.info.description),
    h("p", {}, h("a", { href: address("openapi.json") }, "openapi.json")),
    [...groups].map(([prefix, paths]) => h("section", {}, h("h2", {}, prefix), paths.flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, one]) => operation(path, method, one)))))));
}
