// Views of tables: the requests that were traced, models and machines, the gateway's OpenAPI document.
import {
  address,
  bar,
  clock,
  control,
  encode,
  facts,
  folded,
  grid,
  h,
  histogram,
  latest,
  live,
  num,
  percent,
  pill,
  read,
  scrolled,
  track,
} from "./base.js";

const USUAL = ["path", "target", "model", "version", "start_ms", "ms", "status"];
const [KEPT, EVERY_MS] = [200, 2000];
const QUESTIONS = {
  load: "",
  unload: "It answers no more requests until it is loaded again.",
  rollback: "What served before is served again.",
};

/** The latest requests, the slowest, the failed; one of them with its waterfall. */
export async function requests(main, [key], signal) {
  const all = await read("ui/api/requests", { signal });
  const [hold, which] = [
    h("input", { type: "checkbox" }),
    h(
      "select",
      { "aria-label": "Which requests", onchange: () => fill() },
      Object.keys(all).map((name) => h("option", {}, name)),
    ),
  ];
  const rows = grid("Requests", {
    status: pill,
    at: (line) =>
      h("a", { href: `#/requests/${encode(line.key)}`, "aria-current": String(line.key === key) }, clock(line.unix_ms)),
  });
  const fill = () =>
    rows.fill(
      all[which.value].map((line) => ({
        at: line,
        ms: line.ms,
        status: line.status,
        graph: `${line.graph}/${line.version}`,
        request_id: line.request_id,
        path: line.error || line.path,
      })),
    );
  live.addEventListener(
    "tick",
    ({ detail: { requests: more } }) => {
      all.recent = [
        ...more.toReversed().filter((line) => all.recent.every((old) => old.key !== line.key)),
        ...all.recent,
      ].slice(0, KEPT);
      if (!hold.checked && !rows.node.contains(document.activeElement) && !rows.node.matches(":hover")) fill();
    },
    { signal },
  );
  fill();
  main.replaceChildren(
    h(
      key ? "div.split" : "div.sheet",
      {},
      h(
        "section",
        { "aria-label": "Requests" },
        h("div.title", {}, h("h1", {}, "Requests"), which, h("label", {}, hold, " hold")),
        rows.node,
      ),
      key && (await one(key, signal)),
    ),
  );
}

async function one(key, signal) {
  const request = await read(`ui/api/requests/${encode(key)}`, { signal });
  const { jaeger } = document.body.dataset;
  const link =
    jaeger &&
    request.trace_id &&
    h("a", { href: `${jaeger}/trace/${request.trace_id}`, rel: "noreferrer" }, "in Jaeger");
  return h(
    "section",
    { "aria-label": "One request" },
    h("h2", {}, `${request.graph} ${request.request_id} `, pill(request.status)),
    facts({
      at: clock(request.unix_ms),
      took: `${num(request.ms)} ms`,
      path: request.path,
      error: request.error,
      trace: link,
    }),
    waterfall(request.steps, request.ms),
  );
}

/** A waterfall of the steps; `total` is the whole time, milliseconds. */
export function waterfall(steps, total = 0) {
  const whole = Math.max(total, ...steps.map((step) => step.start_ms + step.ms), 0.001);
  const rows = steps.map((step) => {
    const label = step.fallback_of ? `or ${step.path.split(">").at(-1)}` : step.path.split("/").at(-1);
    const queue = step.queue_ms ?? 0;
    const compute = step.compute_ms ?? step.ms - queue;
    const start = (step.start_ms + Math.max(step.ms - queue - compute, 0) / 2) / whole; // the way there and back
    const bars = track(
      bar(step.ms / whole, step.start_ms / whole, "way"),
      queue > 0 && bar(queue / whole, start, "queue"),
      step.model && bar(compute / whole, start + queue / whole),
    );
    const more = Object.entries(step)
      .filter(([name, value]) => !USUAL.includes(name) && value !== 1)
      .map(
        ([name, value]) =>
          `${name.replace("_ms", "").replaceAll("_", " ")} ${typeof value === "number" ? num(value) : value}`,
      );
    const name = h("th", { scope: "row", title: step.path }, label);
    name.style.paddingInlineStart = `${step.path.split("/").length - 2}rem`;
    return h(
      "tr",
      {},
      name,
      h("td.wide", {}, bars),
      h("td.n", {}, `${num(step.ms)} ms`),
      h(
        "td",
        {},
        step.status !== "OK" && pill(step.status),
        step.model && ` ${step.model} v${step.version} on ${step.target} `,
        h("small", {}, more.join(" · ")),
      ),
    );
  });
  return scrolled(
    "Waterfall",
    h(
      "table",
      {},
      h("caption", {}, `${num(whole)} ms; pale: on the way, hatched: in the queue, full: computed; all in ms`),
      h("tbody", {}, rows),
    ),
  );
}

/** What is served, where, how full; load, unload and roll back where it is allowed. */
export async function models(main, _, signal) {
  const allowed = Object.keys(QUESTIONS).filter((action) => latest.state.actions.includes(action));
  const buttons = (name) =>
    h(
      "menu",
      {},
      allowed.map((action) =>
        h(
          "button",
          {
            type: "button",
            "aria-label": `${action} ${name}`,
            onclick: () =>
              control({ action, name }, QUESTIONS[action] && [`${action} ${name}?`, QUESTIONS[action], action]),
          },
          action,
        ),
      ),
    );
  const graphs = new Set(latest.state.index.filter((one) => one.is_graph).map((one) => one.name));
  const parts = [
    [
      "Services",
      {
        error: null,
        address: (url) => url.replace(/^https?:\/\/([^/]*).*/, "$1"),
        is_up: (isUp, one) => pill(isUp ? "serving" : one.error || "down"),
      },
    ],
    ["Models, by priority", { is_degraded: (isDegraded) => (isDegraded ? "▲ yes" : "no") }],
    ["Replicas", { state: pill }],
    ["Batches: rows, and how often", { executions: histogram }],
    ["Ranks of language models"],
    ["Instances that compute for others"],
    ["Caches, memory, GPU, instances, warm pool", { value: gauge }],
    ["What is loaded", { state: pill, actions: buttons }],
  ].map(([title, cells]) => [title, grid(title, cells)]);
  const fill = async () => {
    const [machines, { model_stats: counts }] = await Promise.all(
      ["ui/api/machines", "v2/models/stats"].map((path) => read(path, { signal })),
    );
    const rows = machines.models.filter(
      (one) =>
        one.kind !== "call" || !machines.models.some((other) => other.kind === "model" && other.model === one.model),
    );
    const gauges = machines.gauges
      .filter((one) => !one.name.startsWith("weft_endpoint"))
      .map(({ labels, ...one }) => ({
        ...one,
        of: Object.entries(labels)
          .map((pair) => pair.join(" "))
          .join(", "),
      }));
    const batches = counts
      .filter((one) => one.batch_stats.length && !graphs.has(one.name))
      .map((one) => ({
        model: one.name,
        version: one.version,
        executions: one.batch_stats.map((size) => [size.batch_size, size.compute_infer.count]),
      }));
    const loaded = latest.state.index.map((one) => ({ ...one, ...(allowed.length && { actions: one.name }) }));
    const all = [
      machines.services,
      rows,
      replicasOf(machines),
      batches,
      machines.ranks,
      machines.roles,
      gauges,
      loaded,
    ];
    parts.forEach(([, part], i) => part.fill(all[i]));
  };
  await fill();
  const again = () => void fill().catch(() => {}); // the banner says what is wrong
  const timer = setInterval(again, EVERY_MS);
  live.addEventListener("state", again, { signal });
  signal.addEventListener("abort", () => clearInterval(timer));
  main.replaceChildren(
    h(
      "div.sheet",
      {},
      h("h1", {}, "Models and machines"),
      parts.map(([title, part]) => h("section", {}, h("h2", {}, title), part.node)),
    ),
  );
}

/** The servers behind each target, of the gauges of the router. */
export function replicasOf({ gauges }) {
  const value = (name, { target, endpoint }) =>
    gauges.find((one) => one.name === name && one.labels.target === target && one.labels.endpoint === endpoint)
      ?.value ?? 0;
  return gauges
    .filter((one) => one.name === "weft_endpoint_state")
    .map(({ labels }) => ({
      ...labels,
      inflight: value("weft_endpoint_inflight", labels),
      picks: value("weft_endpoint_picks_total", labels),
    }));
}

const gauge = (value, { name }) =>
  /usage|utili[sz]ation/.test(name)
    ? h("div.histogram", {}, h("span.n", {}, percent(value)), track(bar(value)))
    : /bytes/.test(name)
      ? `${num(value / 2 ** 20)} MiB`
      : num(value);

/** The OpenAPI document as a page. */
export async function api(main, _, signal) {
  const { paths, info, components } = await read("openapi.json", { signal });
  const resolve = (value = {}) => (value.$ref ? components.schemas[value.$ref.split("/").at(-1)] : value);
  const kind = (value) => {
    const { items, enum: choices, anyOf, type = "any" } = resolve(value);
    if (items) return `array of ${kind(items)}`;
    return (
      choices?.map((one) => JSON.stringify(one)).join(", ") ??
      anyOf?.map(kind).join(" or ") ??
      [type].flat().join(" or ")
    );
  };
  const fields = (title, rows) => {
    const table = grid(title);
    table.fill(
      rows.map(({ schema, description, ...row }) => ({
        ...row,
        type: kind(schema),
        description: description ?? resolve(schema).description ?? "",
      })),
    );
    return rows.length > 0 && [h("h3", {}, title), table.node];
  };
  const content = (title, part) =>
    Object.entries(part?.content ?? {}).map(([media, { schema, ...examples }]) => [
      fields(
        `${title}: ${media}`,
        Object.entries(resolve(schema).properties ?? {}).map(([name, value]) => ({ name, schema: value })),
      ),
      Object.keys(examples).length > 0 && folded("Examples", h("pre", {}, JSON.stringify(examples, null, 2))),
    ]);
  const operation = ([path, method, { summary, parameters = [], requestBody, responses }]) =>
    folded(
      [h("b", {}, method.toUpperCase()), " ", h("code", {}, path), " ", h("small", {}, summary)],
      fields("Parameters", parameters),
      content("Body", requestBody),
      content("Answer", responses["200"]),
      h("p.note", {}, `Statuses: ${Object.keys(responses).join(", ")}`),
    );
  const all = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => [path, method, one]),
  );
  const family = ([path]) =>
    path.startsWith("/v2")
      ? "V2, the Open Inference Protocol"
      : path.includes("messages")
        ? "Anthropic"
        : path.startsWith("/v1")
          ? "OpenAI"
          : "Others";
  main.replaceChildren(
    h(
      "div.sheet",
      {},
      h("h1", {}, "API"),
      h("p", {}, info.description, " ", h("a", { href: address("openapi.json") }, "openapi.json")),
      Object.entries(Object.groupBy(all, family)).map(([title, those]) =>
        h("section", {}, h("h2", {}, title), those.map(operation)),
      ),
    ),
  );
}
