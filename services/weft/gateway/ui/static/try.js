// Try it: a form made from the signature, the answer, its way through the graph, and the same call as code.

import { call, encode, events, known, read, watch } from "./api.js";
import { facts, folded, h, histogram, num, put } from "./dom.js";
import { inputField, parsed } from "./fields.js";
import { Picture } from "./picture.js";
import { LANGUAGES } from "./snippets.js";
import { waterfall } from "./trace.js";

const [TRACE_TRIES, TRACE_EVERY_MS] = [6, 500];

export async function show(main, [chosen], signal) {
  const index = Object.values((await known(signal)).index).filter((one) => one.state === "READY");
  const name = chosen || index[0]?.name;
  if (!name) throw new Error("nothing is served");
  watch([]);
  const graph = index.some((one) => one.is_graph && one.name === name) && (await read(`ui/api/graphs/${encode(name)}`, { signal }));
  const config = await read(`v2/models/${encode(name)}/config`, { signal });
  const names = (isGraph) => [...new Set(index.filter((one) => one.is_graph === isGraph).map((one) => one.name))]
    .map((one) => h("option", { selected: one === name }, one));
  const choice = h("select", { "aria-label": "Graph or model", onchange: () => { location.hash = `#/try/${encode(choice.value)}`; } },
    h("optgroup", { label: "Graphs" }, names(true)), h("optgroup", { label: "Models" }, names(false)));
  const result = h("section.result", { "aria-label": "Answer" }, way(graph, []));
  main.replaceChildren(h("div.split.try", {}, form(config, graph, result, choice, signal), result));
}

function form(config, graph, result, choice, signal) {
  const fields = config.input.map((spec) => inputField(spec, config.max_batch_size > 0));
  const isStream = Boolean(config.model_transaction_policy?.decoupled);
  const option = (name, tag = "input", props = {}) => h("label", {}, name.replaceAll("_", " "), h(tag, { name, ...props }));
  const value = (name) => node.elements[name].value.trim();
  let stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());

  /** What the form says; raises an Error that names the field. */
  async function request() {
    const parameters = { ...(value("parameters") && parsed(value("parameters"), "parameters")), graph_trace: true };
    if (value("priority")) parameters.priority = Number(value("priority"));
    if (value("timeout_ms")) parameters.timeout = Math.round(Number(value("timeout_ms")) * 1000);
    const headers = Object.fromEntries(value("headers").split("\n").filter(Boolean).map((line) => /^([^:]*): *(.*)$/.exec(line)?.slice(1) ?? [line, ""]));
    const inputs = (await Promise.all(fields.map((field) => field.read()))).filter(Boolean);
    return { name: config.name, id: value("request_id") || `page-${crypto.randomUUID().slice(0, 8)}`, inputs, parameters, headers, isStream };
  }
  const run = (work) => async () => {
    stop.abort();
    const own = (stop = new AbortController());
    const tell = (...nodes) => own.signal.aborted || result.replaceChildren(...h("p", {}, nodes).childNodes);
    tell(h("p.note", { role: "status" }, "Working…"));
    try {
      await work(await request(), tell, own.signal);
    } catch (error) {
      result.querySelector(".note")?.remove();
      if (!own.signal.aborted) result.prepend(h("p.error", { role: "alert" }, `▲ ${error.message}`));
    }
  };
  const explain = async ({ inputs, parameters: { graph_trace: _, priority = null, timeout, ...parameters }, headers }, tell) => {
    const given = Object.fromEntries(inputs.filter((input) => !input.raw).map((input) => [input.name, nested(input)]));
    const body = { graph: config.name, version: "", inputs: given, parameters, headers, priority, remaining_ms: timeout ? timeout / 1000 : null };
    tell(h("pre", {}, (await read("ui/api/explain", { body })).text));
  };
  const copy = (write) => async (asked, tell) => {
    tell(h("pre", {}, write(asked)));
    await navigator.clipboard?.writeText(write(asked)).catch(() => {}); // it is shown, too
  };
  const button = (name, onclick) => h("button", { type: "button", onclick }, name);
  const send = run((asked, tell, until) => (isStream ? stream : once)(asked, graph, tell, until));
  const node = h("form", { onsubmit: (event) => { event.preventDefault(); void send(); } }, h("h1", {}, "Try it"), choice,
    fields.filter((field) => !field.isOptional).map((field) => field.node),
    fields.some((field) => field.isOptional) && folded("Optional inputs", fields.filter((field) => field.isOptional).map((field) => field.node)),
    folded("Priority, timeout, headers", option("priority", "input", { type: "number", min: 0 }), option("timeout_ms", "input", { type: "number", min: 1 }),
      option("request_id"), option("headers", "textarea", { placeholder: "x-user-id: 7" }), option("parameters", "textarea", { placeholder: "JSON" })),
    h("menu", {}, h("button.main", {}, "Send"), graph && button("Explain", run(explain)), isStream && button("Stop", () => stop.abort())),
    h("menu", {}, h("small", {}, "Copy as"), Object.entries(LANGUAGES).map(([language, write]) => button(language, run(copy(write))))));
  return node;
}

const nested = ({ shape, data }) => shape.slice(1).reduceRight((rows, size) =>
  Array.from({ length: rows.length / size }, (_, at) => rows.slice(at * size, (at + 1) * size)), data);

async function once({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const tensors = inputs.map(({ raw, file, ...input }) => (raw ? { ...input, parameters: { binary_data_size: raw.size } } : input));
  const json = new Blob([JSON.stringify({ id, inputs: tensors, parameters })]);
  const body = new Blob([json, ...inputs.map((input) => input.raw ?? "")], { type: "application/octet-stream" });
  const start = performance.now();
  try {
    const sent = { ...headers, "inference-header-content-length": json.size };
    const answer = await read(`v2/models/${encode(name)}/infer`, { body, signal, headers: sent });
    const took = performance.now() - start;
    tell(h("h2", {}, `${answer.model_name} version ${answer.model_version} · ${num(took)} ms`), answer.outputs.map(output),
      way(graph, JSON.parse(answer.parameters?.graph_trace ?? "[]"), took));
  } catch (error) {
    tell(way(graph, await traceOf(graph, id, signal)));
    throw error;
  }
}

/** An answer response by response: its texts one after the other, the rest of the last as facts. */
async function stream({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const file = inputs.find((input) => input.raw);
  if (file) throw new Error(`a file cannot be sent where the answer is a stream: ${file.name}`);
  const body = { ...Object.fromEntries(inputs.map((input) => [input.name, input.data])), parameters, id };
  const [text, rest, figures] = [h("pre.stream"), h("div"), h("h2")];
  tell(figures, text, rest);
  const start = performance.now();
  let [first, responses] = [0, 0];
  for await (const [, part] of events(await call(`v2/models/${encode(name)}/generate_stream`, { body, headers, signal }))) {
    if (part.error) throw new Error(part.error);
    const { text_output: said, model_name: model, model_version: version, ...others } = part;
    first ||= performance.now() - start;
    responses += 1;
    text.append([said ?? `${JSON.stringify(others)}\n`].flat().join(""));
    if (said !== undefined) put(rest, facts(others));
    put(figures, `${model} version ${version} · ${responses} responses · the first after ${num(first)} ms · ${num(performance.now() - start)} ms`);
  }
  tell(figures, text, rest, way(graph, await traceOf(graph, id, signal)));
}

/** The steps of a request of a graph as the router keeps them, if it tells them soon. */
async function traceOf(graph, id, signal) {
  for (let left = graph ? TRACE_TRIES : 0; left && !signal.aborted; left -= 1) {
    const line = (await read("ui/api/requests", { signal })).recent.find((one) => one.request_id === id);
    if (line) return (await read(`ui/api/requests/${encode(line.key)}`, { signal })).steps;
    await new Promise((done) => setTimeout(done, TRACE_EVERY_MS));
  }
  return [];
}

/** The waterfall, and the way on the graph's picture. */
function way(graph, steps, took) {
  const picture = graph ? new Picture(graph) : null;
  if (steps.length) picture?.mark(steps);
  return [steps.length > 0 && waterfall(steps, took), picture && h("div.scroll.picture", { tabindex: "0", role: "region", "aria-label": "Picture" }, picture.node)];
}

function output({ name, datatype, shape, data }) {
  const isChart = datatype !== "BYTES" && data.length > 1 && data.length <= 32 && data.every((value) => value >= 0);
  const shown = datatype === "BYTES" ? data.map((one) => h("pre", {}, one))
    : isChart ? histogram(data.map((value, i) => [i, value])) : h("pre", {}, JSON.stringify(data));
  return [h("h3", {}, name, " ", h("small", {}, `${datatype} [${shape}]`)), shown];
}
