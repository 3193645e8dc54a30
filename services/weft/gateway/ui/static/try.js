// Try it: a form made from the signature, the answer, its way through the graph, and the same call as a program.
import { button, facts, folded, h, histogram, num, put, scrolled } from "./dom.js";
import { Picture } from "./graphs.js";
import { address, call, encode, events, key, latest, read } from "./mesh.js";
import { waterfall } from "./tables.js";

const [SIDE, MAX_CHARS, TRACE_TRIES, TRACE_EVERY_MS] = [224, 20_000, 6, 500];

export async function attempt(main, [chosen], signal) {
  const ready = latest.state.index.filter((one) => one.state === "READY");
  const name = chosen || ready[0]?.name;
  if (!name) throw new Error("nothing is served");
  const isGraph = ready.some((one) => one.is_graph && one.name === name);
  const paths = [`v2/models/${encode(name)}/config`, isGraph && `ui/api/graphs/${encode(name)}`];
  const [config, graph] = await Promise.all(paths.map((path) => path && read(path, { signal })));
  const group = ([label, those]) => {
    const names = [...new Set(those.map((one) => one.name))];
    const options = names.map((one) => h("option", { selected: one === name }, one));
    return h("optgroup", { label }, options);
  };
  const groups = Object.entries(Object.groupBy(ready, (one) => (one.is_graph ? "Graphs" : "Models")));
  const go = (event) => (location.hash = `#/try/${encode(event.target.value)}`);
  const choice = h("select", { "aria-label": "Graph or model", onchange: go }, groups.map(group));
  const result = h("section.result", { "aria-label": "Answer" }, way(graph, []));
  main.replaceChildren(h("div.split.try", form(config, graph, choice, result, signal), result));
}

function form(config, graph, choice, result, signal) {
  const isStream = Boolean(config.model_transaction_policy?.decoupled);
  const fields = config.input.map((spec) => inputField(spec, config.max_batch_size > 0));
  let stop = new AbortController();

  /** What the form says; throws an Error that names the field. */
  const request = async () => {
    const { priority, timeout_ms, request_id, headers, parameters } = Object.fromEntries(new FormData(node));
    const inputs = (await Promise.all(fields.map((field) => field.read()))).filter(Boolean);
    return {
      name: config.name,
      id: request_id.trim() || `page-${Math.random().toString(36).slice(2)}`,
      inputs,
      fields: Object.fromEntries(inputs.filter((input) => !input.raw).map((input) => [input.name, input.data])),
      parameters: {
        ...(parameters.trim() && parsed(parameters, "parameters")),
        ...(priority && { priority: Number(priority) }),
        ...(timeout_ms && { timeout: Math.round(Number(timeout_ms) * 1000) }),
      },
      headers: Object.fromEntries([...headers.matchAll(/^\s*(.+?)\s*:\s*(.*)$/gm)].map((found) => found.slice(1))),
      isStream,
    };
  };
  /** A listener that does `work(request, graph, tell, signal)`; the one before it ends. */
  const run = (work) => async (event) => {
    event.preventDefault();
    stop.abort();
    stop = new AbortController();
    const own = AbortSignal.any([signal, stop.signal]);
    const tell = (...parts) => own.aborted || result.replaceChildren(...h("div", parts).childNodes);
    const note = h("p.note", { role: "status" }, "Working…");
    tell(note);
    let asked;
    try {
      asked = await request();
      await work(asked, graph, tell, own);
    } catch (error) {
      note.remove();
      if (own.aborted) return;
      result.prepend(h("p.error", { role: "alert" }, `▲ ${error.message}`));
      const steps = error.status && (await traceOf(graph, asked.id, own).catch(() => []));
      if (steps) result.append(...h("div", way(graph, steps)).childNodes);
    }
  };
  const option = (name, more, tag = "input") => h("label", name.replaceAll("_", " "), h(tag, { name, ...more }));
  const copied = ([language, write]) => {
    const copy = async (asked, _, tell) => {
      tell(cut(language, write(asked)));
      await navigator.clipboard?.writeText(write(asked)).catch(() => {}); // it is shown, too
    };
    return button(language, run(copy));
  };
  const optional = fields.filter((field) => field.isOptional).map((field) => field.node);
  const node = h("form", { onsubmit: run(isStream ? stream : once) }, [
    h("h1", "Try it"),
    choice,
    fields.filter((field) => !field.isOptional).map((field) => field.node),
    optional.length > 0 && folded("Optional inputs", optional),
    folded("Priority, timeout, headers", [
      option("priority", { type: "number" }),
      option("timeout_ms", { type: "number" }),
      option("request_id"),
      option("headers", { placeholder: "x-user-id: 7" }, "textarea"),
      option("parameters", { placeholder: "JSON" }, "textarea"),
    ]),
    h("menu", [h("button.main", "Send"), graph && button("Explain", run(explain)), button("Stop", () => stop.abort())]),
    h("menu", h("small", "Copy as"), Object.entries(LANGUAGES).map(copied)),
  ]);
  return node;
}

async function explain({ name, fields, parameters, headers }, _, tell) {
  const { priority = null, timeout, ...others } = parameters;
  const limits = { priority, remaining_ms: timeout ? timeout / 1000 : null };
  const body = { graph: name, version: "", inputs: fields, parameters: others, headers, ...limits };
  tell(h("pre", (await read("ui/api/explain", { body })).text));
}

async function once({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const sized = (raw) => raw && { parameters: { binary_data_size: raw.size } };
  const tensors = inputs.map(({ raw, file, ...input }) => ({ ...input, ...sized(raw) }));
  const json = new Blob([JSON.stringify({ id, inputs: tensors, parameters: { ...parameters, graph_trace: true } })]);
  const body = new Blob([json, ...inputs.map((input) => input.raw ?? "")], { type: "application/octet-stream" });
  const start = performance.now();
  const sent = { ...headers, "inference-header-content-length": json.size };
  const answer = await read(`v2/models/${encode(name)}/infer`, { body, signal, headers: sent });
  const took = performance.now() - start;
  tell(
    h("h2", `${answer.model_name} version ${answer.model_version} · ${num(took)} ms`),
    answer.outputs.map(output),
    way(graph, JSON.parse(answer.parameters?.graph_trace ?? "[]"), took),
  );
}

/** An answer response by response: its texts one after the other, the rest of the last as facts. */
async function stream({ name, id, inputs, fields, parameters, headers }, graph, tell, signal) {
  if (inputs.some((input) => input.raw)) throw new Error("a file cannot be sent where the answer is a stream");
  const [text, rest, figures] = [h("pre.stream"), h("div"), h("h2")];
  tell(figures, text, rest);
  const start = performance.now();
  const passed = () => performance.now() - start;
  const body = { ...fields, parameters, id };
  const answer = await call(`v2/models/${encode(name)}/generate_stream`, { body, headers, signal });
  let [first, responses] = [0, 0];
  for await (const [, { error, text_output: said, model_name, model_version, ...others }] of events(answer)) {
    if (error) throw new Error(error);
    first ||= passed();
    responses += 1;
    text.append([said ?? `${JSON.stringify(others)}\n`].flat().join(""));
    if (said !== undefined) put(rest, facts(others));
    const times = `the first after ${num(first)} ms · ${num(passed())} ms`;
    put(figures, `${model_name} version ${model_version} · ${responses} responses · ${times}`);
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
  return [steps.length > 0 && waterfall(steps, took), picture && scrolled("Picture", picture.node)];
}

function output({ name, datatype, shape, data }) {
  const isChart = datatype !== "BYTES" && data.length > 1 && data.length <= 32 && data.every((value) => value >= 0);
  const texts = datatype === "BYTES" ? data : [JSON.stringify(data)];
  return [
    h("h3", name, " ", h("small", `${datatype} [${shape}]`)),
    isChart ? histogram(data.map((value, i) => [i, value])) : texts.map((one) => cut(name, String(one))),
  ];
}

/** The beginning of a text, and a link that saves the whole of a long one. */
function cut(name, text) {
  if (text.length <= MAX_CHARS) return h("pre", text);
  const href = URL.createObjectURL(new Blob([text]));
  const whole = h("a", { href, download: `${name}.txt` }, `save all ${num(text.length)} characters`);
  return [h("pre", `${text.slice(0, MAX_CHARS)}…`), whole];
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

const hasColours = (dim) => dim === 1 || dim === 3;

/** The field of an input of the configuration; `read()` gives the tensor, null if it is left out. */
function inputField({ name, data_type: type, dims: own, optional: isOptional }, isBatched) {
  const datatype = type.replace("TYPE_", "").replace("STRING", "BYTES");
  const dims = [...(isBatched ? [-1] : []), ...own];
  const size = dims.reduce((all, dim) => all * Math.max(dim, 1), 1);
  const isText = datatype === "BYTES";
  const isImage = /FP32|UINT8/.test(datatype) && own.length === 3 && (hasColours(own[0]) || hasColours(own[2]));
  const example = isText || isOptional || size > 64 ? "" : JSON.stringify(Array(size).fill(0));
  const choices = ["", "true", "false"].map((value) => h("option", value));
  const field =
    datatype === "BOOL" && size === 1
      ? h("select", choices)
      : h("textarea", { rows: 2, value: example, placeholder: isText ? "text" : "JSON" });
  if (name === "stream") field.value = "true"; // of language models: token by token
  const file =
    (isText || isImage) && h("input", { type: "file", accept: isImage && "image/*", "aria-label": `file for ${name}` });

  async function read() {
    const chosen = file && file.files[0];
    if (chosen && isText) {
      const raw = new Blob([new Uint32Array([chosen.size]), chosen]);
      return { name, datatype, shape: dims.map(() => 1), raw, file: chosen.name };
    }
    if (field.value === "" && isOptional && !chosen) return null;
    const isPlain = isText && (size === 1 || !field.value.startsWith("["));
    const data = chosen
      ? await pixels(chosen, own, datatype)
      : [isPlain ? field.value : parsed(field.value, name)].flat(Infinity);
    const open = dims.indexOf(-1, isBatched && dims.lastIndexOf(-1) > 0 ? 1 : 0); // it takes what the others leave
    const rest = (i) => (chosen ? (isBatched && i === 0 ? 1 : SIDE) : i === open ? data.length / size : 1);
    const shape = dims.map((dim, i) => (dim >= 0 ? dim : rest(i)));
    if (!shape.every(Number.isInteger))
      throw new Error(`${name} has ${data.length} values, which do not fit [${dims}]`);
    const cut = (rows, length) =>
      Array.from({ length: rows.length / length }, (_, at) => rows.slice(at * length, (at + 1) * length));
    return { name, datatype, shape, data: shape.slice(1).reduceRight(cut, data) };
  }
  const label = h("label", name, " ", h("small", `${datatype} [${dims}]`), field);
  return { node: h("div.field", label, file), read, isOptional };
}

/** Pixels of a picture, channels first or last as `dims` has them; a side of any length is SIDE long. */
async function pixels(file, dims, datatype) {
  const isFirst = hasColours(dims[0]);
  const [channels, height, width] = (isFirst ? dims : [dims[2], dims[0], dims[1]]).map((dim) => (dim < 0 ? SIDE : dim));
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(await createImageBitmap(file), 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const scaled = (value) => (datatype === "UINT8" ? Math.round(value) : Number((value / 255).toFixed(4)));
  const places = Array.from({ length: height * width }, (_, at) => {
    const [red, green, blue] = data.subarray(4 * at, 4 * at + 3);
    return (channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue]).map(scaled);
  });
  return isFirst ? places[0].flatMap((_, channel) => places.map((place) => place[channel])) : places.flat();
}

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Object.entries(value).map((pair) => pair.map(python).join(": "));
  return `{${pairs.join(", ")}}`;
}

const values = ({ file, data }) => (file ? `[[open(${python(file)}, "rb").read()]]` : python(data));

function curl({ name, inputs, fields, parameters, headers, isStream }) {
  const url = address(`v2/models/${encode(name)}/${isStream ? "generate_stream" : "infer"}`);
  const file = inputs[0]?.file; // the only input
  const body = file ? `@${file}` : JSON.stringify(isStream ? { ...fields, parameters } : { inputs, parameters });
  const kind = file ? "inference-header-content-length: 0" : "content-type: application/json";
  return [
    `curl -N ${shell(url)}`,
    ...Object.entries(headers).map((pair) => `-H ${shell(pair.join(": "))}`),
    ...(key() ? ['-H "authorization: Bearer $WEFT_KEY"'] : []),
    `-H ${shell(kind)}`,
    `${file ? "--data-binary" : "-d"} ${shell(body)}`,
  ].join(" \\\n  ");
}

function weft({ name, inputs, parameters, headers, isStream }) {
  const pairs = inputs.map((input) => `${python(input.name)}: ${values(input)}`).join(", ");
  const call = `(**{${pairs}}, parameters=${python(parameters)}, headers=${python(headers)})`;
  const client = `client[${python(name)}]`;
  return `import weft

with weft.connect("127.0.0.1:8001") as client:  # the router
    ${isStream ? `for part in ${client}.stream${call}:\n        print(dict(part))` : `print(dict(${client}${call}))`}`;
}

function tritonclient({ name, inputs, parameters, headers }) {
  const tensor = (one) => `http.InferInput(${python(one.name)}, ${python(one.shape)}, "${one.datatype}")`;
  const fill = (one, i) =>
    `inputs[${i}].set_data_from_numpy(np.array(${values(one)}, triton_to_np_dtype("${one.datatype}")))`;
  return `import numpy as np
import tritonclient.http as http
from tritonclient.utils import triton_to_np_dtype

client = http.InferenceServerClient("${new URL(address("")).host}")
inputs = [${inputs.map(tensor).join(", ")}]
${inputs.map(fill).join("\n")}
answer = client.infer(${python(name)}, inputs, parameters=${python(parameters)}, headers=${python(headers)})
print({one["name"]: answer.as_numpy(one["name"]) for one in answer.get_response()["outputs"]})`;
}

/** By name: the text for a request. */
const LANGUAGES = { curl, Python: weft, tritonclient };
