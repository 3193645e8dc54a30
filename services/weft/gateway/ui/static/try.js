// Try it: a form made from the signature, the answer, its way through the graph, and the same call as code.

import { call, encode, events, known, latest, live, read, watch } from "./api.js";
import { facts, folded, h, histogram, num, percent, put } from "./dom.js";
import { inputField } from "./fields.js";
import { Picture } from "./picture.js";
import { LANGUAGES } from "./snippets.js";
import { waterfall } from "./trace.js";

const TRACE_WAIT_MS = 4000;

export async function show(main, [chosen], signal) {
  const { index } = await known(signal);
  const names = [...new Set(index.filter((one) => one.state === "READY").map((one) => one.name))];
  const name = chosen || index.find((one) => one.is_graph)?.name;
  if (!name) throw new Error("nothing is served");
  watch([]);
  const isGraph = index.some((one) => one.is_graph && one.name === name);
  const [config, graph] = await Promise.all([read(`v2/models/${encode(name)}/config`, { signal }),
    isGraph && read(`ui/api/graphs/${encode(name)}`, { signal })]);
  const choice = h("input", { value: name, list: "names", "aria-label": "Graph or model", onchange: () => {
    if (names.includes(choice.value)) location.hash = `#/try/${encode(choice.value)}`;
  } });
  const result = h("section.result", { "aria-label": "Answer" }, graph && h("div.scroll.picture", {}, new Picture(graph).node));
  main.replaceChildren(h("div.split.try", {}, form(config, graph, result, choice, signal), result,
    h("datalist", { id: "names" }, names.map((one) => h("option", { value: one })))));
}

function form(config, graph, result, choice, signal) {
  const fields = config.input.map((spec) => inputField(spec, config.max_batch_size > 0));
  const option = (label, props) => h("label", {}, label, h(props.rows ? "textarea" : "input", props));
  const more = Object.fromEntries(Object.entries({
    priority: { type: "number", min: 0 }, timeout_ms: { type: "number", min: 1 }, request_id: {},
    headers: { rows: 2, placeholder: "x-user-id: 7" }, parameters: { rows: 2, placeholder: '{"team": "shipping"}' },
  }).map(([name, props]) => [name, option(name.replace("_", " "), { name, ...props })]));
  const value = (name) => more[name].lastChild.value.trim();
  const isStream = Boolean(config.model_transaction_policy?.decoupled);

  /** What the form says; raises an Error that names the field. */
  async function request() {
    const parameters = { ...(value("parameters") ? parsed(value("parameters"), "parameters") : {}), graph_trace: true };
    if (value("priority")) parameters.priority = Number(value("priority"));
    if (value("timeout_ms")) parameters.timeout = Math.round(Number(value("timeout_ms")) * 1000);
    const lines = value("headers").split("\n").filter((line) => line.trim());
    const headers = Object.fromEntries(lines.map((line) => line.split(/:(.*)/s).slice(0, 2).map((part) => part.trim())));
    const inputs = (await Promise.all(fields.map((field) => field.read()))).filter(Boolean);
    return { name: config.name, id: value("request_id") || `page-${crypto.randomUUID().slice(0, 8)}`, inputs, parameters, headers, isStream };
  }

  let stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());
  async function run(work) {
    stop.abort();
    stop = new AbortController();
    const parts = [h("p.note", { role: "status" }, "Working…")];
    const tell = (...nodes) => result.replaceChildren(...nodes.flat(2));
    tell(...parts);
    try {
      await work(await request(), tell, stop.signal);
    } catch (error) {
      if (!stop.signal.aborted) result.prepend(h("p.error", { role: "alert" }, `▲ ${error.message}`));
    } finally {
      result.querySelector(".note[role=status]")?.remove();
    }
  }
  const send = (asked, tell, until) => (isStream ? stream : once)(asked, graph, tell, until);
  const explain = async ({ inputs, parameters: { graph_trace: _, priority = null, timeout, ...parameters }, headers }, tell) => {
    const given = Object.fromEntries(inputs.filter((input) => !input.raw).map((input) => [input.name, input.nested]));
    const body = { graph: config.name, version: "", inputs: given, parameters, headers, priority, remaining_ms: timeout ? timeout / 1000 : null };
    tell(h("pre", {}, (await read("ui/api/explain", { body })).text));
  };
  const code = Object.entries(LANGUAGES).map(([language, write]) => h("button", { type: "button", onclick: () => run(async (asked, tell) => {
    tell(h("pre", {}, write(asked)));
    await navigator.clipboard?.writeText(write(asked)).catch(() => {}); // it is shown, too
  }) }, language));
  const optional = fields.filter((field) => field.isOptional);
  return h("form", { onsubmit: (event) => { event.preventDefault(); void run(send); } },
    h("h1", {}, "Try it"), choice, fields.filter((field) => !field.isOptional).map((field) => field.node),
    optional.length > 0 && folded("Optional inputs", ...optional.map((field) => field.node)),
    folded("Priority, timeout, headers", ...Object.values(more)),
    h("menu", {}, h("button.main", {}, "Send"), graph && h("button", { type: "button", onclick: () => run(explain) }, "Explain"),
      isStream && h("button", { type: "button", onclick: () => stop.abort() }, "Stop")),
    h("menu", { "aria-label": "Copy as" }, h("small", {}, "Copy as"), code));
}

export function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

async function once({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const tensors = inputs.map(({ raw, nested, file, ...input }) => (raw ? { ...input, parameters: { binary_data_size: raw.size } } : input));
  const json = new TextEncoder().encode(JSON.stringify({ id, inputs: tensors, parameters }));
  const body = new Blob([json, ...inputs.flatMap((input) => input.raw ?? [])], { type: "application/octet-stream" });
  const start = performance.now();
  try {
    const sent = { ...headers, "inference-header-content-length": json.length };
    const answer = await read(`v2/models/${encode(name)}/infer`, { body, signal, headers: sent });
    const took = performance.now() - start;
    const steps = JSON.parse(answer.parameters?.graph_trace ?? "[]");
    tell(h("h2", {}, `${answer.model_name} version ${answer.model_version} · ${num(took)} ms`),
      answer.outputs.map(output), way(graph, steps, took));
  } catch (error) {
    if (!signal.aborted) tell(way(graph, await traceOf(id, signal)));
    throw error;
  }
}

/** An answer response by response: its texts one after the other, the rest of the last as facts. */
async function stream({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const file = inputs.find((input) => input.raw);
  if (file) throw new Error(`a file cannot be sent where the answer is a stream: ${file.name}`);
  const body = { ...Object.fromEntries(inputs.map(({ name: input, data }) => [input, data])), parameters, id };
  const [text, rest, figures] = [h("pre.stream", { "aria-label": "Text" }), h("div"), h("h2", { role: "status" })];
  tell(figures, text, rest);
  const start = performance.now();
  let [first, responses] = [0, 0];
  for await (const [, part] of events(await call(`v2/models/${encode(name)}/generate_stream`, { body, headers, signal }))) {
    if (part.error) throw new Error(part.error);
    const { text_output: said, model_name: model, model_version: version, ...others } = part;
    const took = performance.now() - start;
    first ||= took;
    responses += 1;
    text.append([said ?? JSON.stringify(others)].flat().join(""), said === undefined ? "\n" : "");
    put(rest, facts(Object.fromEntries(Object.entries(said === undefined ? {} : others).map(([key, value]) => [key, String(value)]))));
    put(figures, `${model} version ${version} · ${responses} responses · the first after ${num(first)} ms · ${num(took)} ms`);
  }
  tell(figures, text, rest, way(graph, await traceOf(id, signal)));
}

/** The trace of a request as the router kept it, if it comes soon. */
async function traceOf(id, signal) {
  const late = AbortSignal.any([signal, AbortSignal.timeout(TRACE_WAIT_MS)]);
  const line = await new Promise((done) => {
    late.addEventListener("abort", () => done(null));
    live.addEventListener("tick", ({ detail }) => {
      const found = detail.requests.find((one) => one.request_id === id);
      if (found) done(found);
    }, { signal: late });
  });
  return line ? (await read(`ui/api/requests/${encode(line.key)}`)).steps : [];
}

/** The waterfall, and the way on the graph's picture. */
function way(graph, steps, took) {
  if (!graph) return [];
  const picture = new Picture(graph);
  if (steps.length) picture.mark(steps);
  return [steps.length > 0 && waterfall(steps, took), h("div.scroll.picture", {}, picture.node)].filter(Boolean);
}

function output({ name, datatype, shape, data }) {
  const isText = datatype === "BYTES";
  const isChart = !isText && data.length > 1 && data.length <= 32 && data.every((value) => value >= 0);
  const shown = isText ? data.map((one) => h("pre", {}, one)) : isChart ? histogram(data.map((value, i) => [i, value])) : h("pre", {}, JSON.stringify(data));
  return [h("h3", {}, name, " ", h("small", {}, `${datatype} [${shape}]`)), shown].flat();
}
