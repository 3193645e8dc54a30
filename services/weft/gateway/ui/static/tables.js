// Views of tables: the requests that were traced, models and machines, the gateway's OpenAPI document.
import { button, clock, facts, folded, h, histogram, num, percent, pill, put, table } from "./dom.js";
import { address, control, encode, latest, on, read } from "./mesh.js";

const [KEPT, MAX_STEPS, EVERY_MS] = [200, 1000, 2000];
const QUESTIONS = {
  load: "",
  unload: "It answers no more requests until it is loaded again.",
  rollback: "What served before is served again.",
};
const linkTo = (line, text, more) => h("a", { href: `#/requests/${encode(line.key)}`, ...more }, text);

/** The latest requests, the slowest, the failed; one of them with its waterfall. */
export async function requests(main, [key], signal) {
  const all = await read("ui/api/requests", { signal });
  const gone = (error) => h("section", h("p", { role: "alert" }, `▲ ${error.message}`));
  const one = key && (await read(`ui/api/requests/${encode(key)}`, { signal }).then(request, gone));
  const [hold, rows] = [h("input", { type: "checkbox" }), h("div")];
  const names = Object.keys(all).map((name) => h("option", name));
  const which = h("select", { "aria-label": "Which requests", onchange: () => draw() }, names);
  const row = (line) => ({
    at: linkTo(line, clock(line.unix_ms), { "aria-current": String(line.key === key) }),
    ms: line.ms,
    status: line.status,
    graph: `${line.graph}/${line.version}`,
    request_id: line.request_id,
    path: line.error || line.path,
  });
  const draw = () => put(rows, table("Requests", all[which.value].map(row)));
  const add = ({ requests: more }) => {
    const known = new Set(all.recent.map((line) => line.key));
    all.recent = [...more.toReversed().filter((line) => !known.has(line.key)), ...all.recent].slice(0, KEPT);
    if (!hold.checked && !rows.contains(document.activeElement) && !rows.matches(":hover")) draw();
  };
  draw();
  on("tick", add, signal);
  const title = h("div.title", h("h1", "Requests"), which, h("label", hold, " hold"));
  const list = h("section", { "aria-label": "Requests" }, title, rows);
  main.replaceChildren(h(one ? "div.split" : "div.sheet", list, one));
}

function request({ graph, request_id, trace_id, status, unix_ms, ms, path, error, steps, mates }) {
  const { jaeger } = document.body.dataset;
  return h("section", { "aria-label": "One request" }, [
    h("h2", `${graph} ${request_id} `, pill(status)),
    facts({
      at: clock(unix_ms),
      took: `${num(ms)} ms`,
      path,
      error,
      trace: jaeger && trace_id && h("a", { href: `${jaeger}/trace/${trace_id}`, rel: "noreferrer" }, "in Jaeger"),
      "in a batch with": mates.length > 0 && mates.map((mate) => [linkTo(mate, mate.request_id || mate.key), " "]),
    }),
    waterfall(steps, ms),
  ]);
}

/** A waterfall of the steps; `total` is the whole time, milliseconds. */
export function waterfall(steps, total = 0) {
  const shown = steps.slice(0, MAX_STEPS);
  const whole = Math.max(total, ...shown.map((step) => step.start_ms + step.ms), 0.001);
  const bar = (kind, start, ms) => {
    const node = h(`i.${kind}`);
    [node.style.left, node.style.width] = [start, ms].map((value) => `${(value / whole) * 100}%`);
    return node;
  };
  const row = ({ path, start_ms, ms, status, model, version, target, batch, ...more }) => {
    const { fallback_of, queue_ms = 0, compute_ms = ms - queue_ms } = more;
    const start = start_ms + (more.responses ? 0 : Math.max(ms - queue_ms - compute_ms, 0) / 2); // the way there and back
    const name = h("span", { title: path }, fallback_of ? `or ${path.split(">").at(-1)}` : path.split("/").at(-1));
    name.style.paddingInlineStart = `${path.split("/").length - 2}rem`;
    const notes = Object.entries(more)
      .filter(([, value]) => value !== 1)
      .map(([name, value]) => `${name.replace("_ms", "").replaceAll("_", " ")} ${value.toFixed ? num(value) : value}`);
    return {
      step: name,
      time: h("div.track", { "aria-hidden": "true" }, [
        bar("way", start_ms, ms),
        queue_ms > 0 && bar("queue", start, queue_ms),
        model && bar("fill", start + queue_ms, compute_ms),
      ]),
      ms,
      told: [
        status !== "OK" && pill(status),
        model && ` ${model} v${version} on ${target} `,
        h("small", notes.join(" · ")),
      ],
    };
  };
  return h("div.waterfall", [
    h("p.note", `${num(whole)} ms; pale: on the way, hatched: in the queue, full: computed; all in ms`),
    table("Waterfall", shown.map(row)),
    shown.length < steps.length && h("p.note", `and ${num(steps.length - shown.length)} steps more`),
  ]);
}

/** What is served, where, how full; load, unload and roll back where it is allowed. */
export async function models(main, _, signal) {
  const act = (name) => (action) => {
    const question = QUESTIONS[action] && [`${action} ${name}?`, QUESTIONS[action], action];
    return button(action, () => control({ action, name }, question), { "aria-label": `${action} ${name}` });
  };
  const cells = {
    error: null,
    address: (url) => url.replace(/^https?:\/\/([^/]*).*/, "$1"),
    is_up: (isUp, one) => pill(isUp ? "serving" : one.error || "down"),
    executions: (pairs) => histogram(pairs),
    value: gauge,
  };
  const sheet = h("div.sheet");
  const draw = async () => {
    const paths = ["ui/api/machines", "v2/models/stats"];
    const [machines, { model_stats: counts }] = await Promise.all(paths.map((path) => read(path, { signal })));
    const { index, actions } = latest.state;
    const allowed = Object.keys(QUESTIONS).filter((action) => actions.includes(action));
    const menu = ({ name }) => allowed.length && { actions: h("menu", allowed.map(act(name))) };
    const graphs = new Set(index.filter((one) => one.is_graph).map((one) => one.name));
    const parts = {
      ...machines,
      "Batches: rows, and how often": counts
        .filter(({ name, batch_stats }) => batch_stats.length && !graphs.has(name))
        .map(({ name, version, batch_stats }) => ({
          model: name,
          version,
          executions: batch_stats.map((size) => [size.batch_size, size.compute_infer.count]),
        })),
      "What is loaded": index.map((one) => ({ ...one, ...menu(one) })),
    };
    const section = ([title, rows]) => rows.length > 0 && h("section", h("h2", title), table(title, rows, cells));
    put(sheet, h("h1", "Models and machines"), Object.entries(parts).map(section));
  };
  await draw();
  const again = () => void draw().catch(() => {}); // the banner says what is wrong
  const timer = setInterval(again, EVERY_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  on("state", again, signal);
  main.replaceChildren(sheet);
}

function gauge(value, { name }) {
  if (/usage|utili[sz]ation/.test(name)) return [h("meter", { value, "aria-hidden": "true" }), ` ${percent(value)}`];
  return name.includes("bytes") ? `${num(value / 2 ** 20)} MiB` : num(value);
}

/** The OpenAPI document as a page. */
export async function api(main, _, signal) {
  const { paths, info, components } = await read("openapi.json", { signal });
  const resolve = (value = {}) => (value.$ref ? components.schemas[value.$ref.split("/").at(-1)] : value);
  const kind = (value) => {
    const { items, enum: choices, anyOf, type = "any" } = resolve(value);
    if (items) return `array of ${kind(items)}`;
    if (choices) return choices.map((one) => JSON.stringify(one)).join(", ");
    return (anyOf?.map(kind) ?? [type].flat()).join(" or ");
  };
  const fields = (place) => (part) => {
    const { properties = {}, required = [] } = resolve(part[1].schema);
    const field = ([name, schema]) => ({ name, in: place, required: required.includes(name), schema });
    return Object.entries(properties).map(field);
  };
  const row = ({ name, in: place, required = false, schema, description }) => {
    return { name, in: place, required, type: kind(schema), about: description ?? resolve(schema).description ?? "" };
  };
  const operation = ({ path, method, summary, parameters = [], requestBody, responses }) => {
    const [body, answer] = [requestBody, responses["200"]].map((part) => Object.entries(part?.content ?? {}));
    const rows = [parameters, body.map(fields("body")), answer.map(fields("answer"))].flat(2).map(row);
    const example = ([media, { schema, ...more }]) =>
      Object.keys(more).length > 0 && folded(`Example, ${media}`, h("pre", JSON.stringify(more, null, 2)));
    return folded(
      [h("b", method.toUpperCase()), " ", h("code", path), " ", h("small", summary)],
      table("Fields", rows),
      [...body, ...answer].map(example),
      h("p.note", `Statuses: ${Object.keys(responses).join(", ")}`),
    );
  };
  const all = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => ({ path, method, ...one })),
  );
  const family = ([title, those]) => h("section", h("h2", title), those.map(operation));
  const about = h("p", info.description, " ", h("a", { href: address("openapi.json") }, "openapi.json"));
  const families = Object.entries(Object.groupBy(all, ({ tags }) => tags[0])).map(family);
  main.replaceChildren(h("div.sheet", h("h1", "API"), about, families));
}
