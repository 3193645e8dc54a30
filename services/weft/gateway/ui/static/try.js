// Try it: a form made from the signature, the answer, its way through the graph, and the same call as a program.
import {
  address,
  call,
  encode,
  events,
  facts,
  folded,
  h,
  histogram,
  key,
  latest,
  num,
  put,
  read,
  scrolled,
} from "./base.js";
import { Picture } from "./graphs.js";
import { waterfall } from "./tables.js";

const [SIDE, TRACE_TRIES, TRACE_EVERY_MS] = [224, 6, 500];

export async function attempt(main, [chosen], signal) {
  const ready = latest.state.index.filter((one) => one.state === "READY");
  const name = chosen || ready[0]?.name;
  if (!name) throw new Error("nothing is served");
  const graph = ready.some((one) => one.is_graph && one.name === name)
    ? await read(`ui/api/graphs/${encode(name)}`, { signal })
    : null;
  const config = await read(`v2/models/${encode(name)}/config`, { signal });
  const names = (isGraph) =>
    [...new Set(ready.filter((one) => one.is_graph === isGraph).map((one) => one.name))].map((one) =>
      h("option", { selected: one === name }, one),
    );
  const choice = h(
    "select",
    {
      "aria-label": "Graph or model",
      onchange: () => {
        location.hash = `#/try/${encode(choice.value)}`;
      },
    },
    h("optgroup", { label: "Graphs" }, names(true)),
    h("optgroup", { label: "Models" }, names(false)),
  );
  const result = h("section.result", { "aria-label": "Answer" }, way(graph, []));
  main.replaceChildren(h("div.split.try", {}, form(config, graph, result, choice, signal), result));
}

function form(config, graph, result, choice, signal) {
  const all = config.input.map((spec) => inputField(spec, config.max_batch_size > 0));
  const isStream = Boolean(config.model_transaction_policy?.decoupled);
  const option = (name, props, tag = "input") => h("label", {}, name.replaceAll("_", " "), h(tag, { name, ...props }));
  const value = (name) => node.elements[name].value.trim();
  let stop = new AbortController();
  signal.addEventListener("abort", () => stop.abort());

  /** What the form says; raises an Error that names the field. */
  async function request() {
    const parameters = { ...(value("parameters") && parsed(value("parameters"), "parameters")) };
    if (value("priority")) parameters.priority = Number(value("priority"));
    if (value("timeout_ms")) parameters.timeout = Math.round(Number(value("timeout_ms")) * 1000);
    const headers = Object.fromEntries(
      value("headers")
        .split("\n")
        .filter(Boolean)
        .map((line) => line.split(/: *(.*)/s).slice(0, 2)),
    );
    const inputs = (await Promise.all(all.map((field) => field.read()))).filter(Boolean);
    const fields = Object.fromEntries(inputs.filter((input) => !input.raw).map((input) => [input.name, input.data]));
    return {
      name: config.name,
      id: value("request_id") || `page-${Math.random().toString(36).slice(2)}`,
      inputs,
      fields,
      parameters,
      headers,
      isStream,
    };
  }
  /** A listener that does `work(request, tell, signal)`, the one before it ends. */
  const run = (work) => async () => {
    stop.abort();
    const { signal: own } = (stop = new AbortController());
    const tell = (...parts) => own.aborted || result.replaceChildren(...parts.flat(Infinity).filter(Boolean));
    tell(h("p.note", { role: "status" }, "Working…"));
    let asked;
    try {
      asked = await request();
      await work(asked, tell, own);
    } catch (error) {
      result.querySelector(".note")?.remove();
      if (own.aborted) return;
      result.prepend(h("p.error", { role: "alert" }, `▲ ${error.message}`));
      if (error.status)
        result.append(...h("div", {}, way(graph, await traceOf(graph, asked.id, own).catch(() => []))).children);
    }
  };
  const explain = async ({ fields, parameters: { priority = null, timeout, ...parameters }, headers }, tell) => {
    const body = {
      graph: config.name,
      version: "",
      inputs: fields,
      parameters,
      headers,
      priority,
      remaining_ms: timeout ? timeout / 1000 : null,
    };
    tell(h("pre", {}, (await read("ui/api/explain", { body })).text));
  };
  const copy = (write) => async (asked, tell) => {
    tell(h("pre", {}, write(asked)));
    await navigator.clipboard?.writeText(write(asked)).catch(() => {}); // it is shown, too
  };
  const button = (name, onclick) => h("button", { type: "button", onclick }, name);
  const send = run((asked, tell, until) => (isStream ? stream : once)(asked, graph, tell, until));
  const inputs = (isOptional) => all.filter((field) => field.isOptional === isOptional).map((field) => field.node);
  const node = h(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        void send();
      },
    },
    h("h1", {}, "Try it"),
    choice,
    inputs(false),
    inputs(true).length > 0 && folded("Optional inputs", inputs(true)),
    folded(
      "Priority, timeout, headers",
      option("priority", { type: "number" }),
      option("timeout_ms", { type: "number" }),
      option("request_id"),
      option("headers", { placeholder: "x-user-id: 7" }, "textarea"),
      option("parameters", { placeholder: "JSON" }, "textarea"),
    ),
    h(
      "menu",
      {},
      h("button.main", {}, "Send"),
      graph && button("Explain", run(explain)),
      isStream && button("Stop", () => stop.abort()),
    ),
    h(
      "menu",
      {},
      h("small", {}, "Copy as"),
      Object.entries(LANGUAGES).map(([language, write]) => button(language, run(copy(write)))),
    ),
  );
  return node;
}

async function once({ name, id, inputs, parameters, headers }, graph, tell, signal) {
  const tensors = inputs.map(({ raw, file, ...input }) =>
    raw ? { ...input, parameters: { binary_data_size: raw.size } } : input,
  );
  const json = new Blob([JSON.stringify({ id, inputs: tensors, parameters: { ...parameters, graph_trace: true } })]);
  const body = new Blob([json, ...inputs.map((input) => input.raw ?? "")], { type: "application/octet-stream" });
  const start = performance.now();
  const sent = { ...headers, "inference-header-content-length": json.size };
  const answer = await read(`v2/models/${encode(name)}/infer`, { body, signal, headers: sent });
  const took = performance.now() - start;
  tell(
    h("h2", {}, `${answer.model_name} version ${answer.model_version} · ${num(took)} ms`),
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
  let [first, responses] = [0, 0];
  const answer = await call(`v2/models/${encode(name)}/generate_stream`, {
    body: { ...fields, parameters, id },
    headers,
    signal,
  });
  for await (const [, { error, text_output: said, model_name: model, model_version: version, ...others }] of events(
    answer,
  )) {
    if (error) throw new Error(error);
    first ||= performance.now() - start;
    responses += 1;
    text.append([said ?? `${JSON.stringify(others)}\n`].flat().join(""));
    if (said !== undefined) put(rest, facts(others));
    put(
      figures,
      `${model} version ${version} · ${responses} responses · the first after ${num(first)} ms · ${num(performance.now() - start)} ms`,
    );
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
  const picture = graph && new Picture(graph);
  if (steps.length) picture?.mark(steps);
  return [steps.length > 0 && waterfall(steps, took), picture && scrolled("Picture", picture.node)];
}

function output({ name, datatype, shape, data }) {
  const isChart = datatype !== "BYTES" && data.length > 1 && data.length <= 32 && data.every((value) => value >= 0);
  return [
    h("h3", {}, name, " ", h("small", {}, `${datatype} [${shape}]`)),
    isChart
      ? histogram(data.map((value, i) => [i, value]))
      : datatype === "BYTES"
        ? data.map((one) => h("pre", {}, one))
        : h("pre", {}, JSON.stringify(data)),
  ];
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

/** The field of an input of the configuration; `read()` gives the tensor, null if it is left out. */
function inputField({ name, data_type: type, dims: own, optional: isOptional }, isBatched) {
  const datatype = type.replace("TYPE_", "").replace("STRING", "BYTES");
  const dims = [...(isBatched ? [-1] : []), ...own];
  const size = dims.reduce((all, dim) => all * Math.max(dim, 1), 1);
  const isText = datatype === "BYTES";
  const isImage =
    (datatype === "FP32" || datatype === "UINT8") &&
    own.length === 3 &&
    [own[0], own[2]].some((dim) => dim === 1 || dim === 3);
  const example = isText || isOptional || size > 64 ? "" : JSON.stringify(Array(size).fill(0));
  const field =
    datatype === "BOOL" && size === 1
      ? h(
          "select",
          {},
          ["", "true", "false"].map((value) => h("option", {}, value)),
        )
      : h("textarea", { rows: 2, value: example, placeholder: isText ? "text" : "JSON" });
  if (name === "stream") field.value = "true"; // of language models: token by token
  const file =
    (isText || isImage) && h("input", { type: "file", accept: isImage && "image/*", "aria-label": `file for ${name}` });

  async function read() {
    const [chosen] = file ? file.files : [];
    if (chosen && isText)
      return {
        name,
        datatype,
        shape: dims.map(() => 1),
        raw: new Blob([new Uint32Array([chosen.size]), chosen]),
        file: chosen.name,
      };
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
  return {
    node: h("div.field", {}, h("label", {}, name, " ", h("small", {}, `${datatype} [${dims}]`), field), file),
    read,
    isOptional,
  };
}

/** Pixels of a picture, channels first or last as `dims` has them; a side of any length is SIDE long. */
async function pixels(file, dims, datatype) {
  const isFirst = dims[0] === 1 || dims[0] === 3;
  const [channels, height, width] = (isFirst ? dims : [dims[2], dims[0], dims[1]]).map((dim) => (dim < 0 ? SIDE : dim));
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(await createImageBitmap(file), 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  return Array.from({ length: channels * height * width }, (_, i) => {
    const [channel, at] = isFirst
      ? [Math.floor(i / (height * width)), i % (height * width)]
      : [i % channels, Math.floor(i / channels)];
    const [red, green, blue] = data.subarray(4 * at);
    const value = channels === 1 ? 0.299 * red + 0.587 * green + 0.114 * blue : [red, green, blue][channel];
    return datatype === "UINT8" ? Math.round(value) : Number((value / 255).toFixed(4));
  });
}

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object")
    return `{${Object.entries(value)
      .map((pair) => pair.map(python).join(": "))
      .join(", ")}}`;
  return { true: "True", false: "False", null: "None" }[value] ?? JSON.stringify(value);
}

const values = ({ file, data }) => (file ? `[[open(${python(file)}, "rb").read()]]` : python(data));

function curl({ name, inputs, fields, parameters, headers, isStream }) {
  const lines = Object.entries(headers).map((pair) => `-H ${shell(pair.join(": "))}`);
  if (key()) lines.push('-H "authorization: Bearer $WEFT_KEY"');
  if (inputs[0]?.file)
    lines.push("-H 'inference-header-content-length: 0'", `--data-binary ${shell(`@${inputs[0].file}`)}`); // the only input
  else
    lines.push(
      "-H 'content-type: application/json'",
      `-d ${shell(JSON.stringify(isStream ? { ...fields, parameters } : { inputs, parameters }))}`,
    );
  return [
    `curl -N ${shell(address(`v2/models/${encode(name)}/${isStream ? "generate_stream" : "infer"}`))}`,
    ...lines,
  ].join(" \\\n  ");
}

function weft({ name, inputs, parameters, headers, isStream }) {
  const call = `(**{${inputs.map((input) => `${python(input.name)}: ${values(input)}`).join(", ")}}, parameters=${python(parameters)}, headers=${python(headers)})`;
  return [
    "import weft",
    "",
    'with weft.connect("127.0.0.1:8001") as client:  # the router',
    ...(isStream
      ? [`    for part in client[${python(name)}].stream${call}:`, "        print(dict(part))"]
      : [`    print(dict(client[${python(name)}]${call}))`]),
  ].join("\n");
}

function tritonclient({ name, inputs, parameters, headers }) {
  return [
    "import numpy as np",
    "import tritonclient.http as http",
    "from tritonclient.utils import triton_to_np_dtype",
    "",
    `client = http.InferenceServerClient("${new URL(address("")).host}")`,
    `inputs = [${inputs.map((one) => `http.InferInput(${python(one.name)}, ${python(one.shape)}, "${one.datatype}")`).join(", ")}]`,
    ...inputs.map(
      (input, i) =>
        `inputs[${i}].set_data_from_numpy(np.array(${values(input)}, triton_to_np_dtype("${input.datatype}")))`,
    ),
    `answer = client.infer(${python(name)}, inputs, parameters=${python(parameters)}, headers=${python(headers)})`,
    'print({one["name"]: answer.as_numpy(one["name"]) for one in answer.get_response()["outputs"]})',
  ].join("\n");
}

/** By name: the text for a request. */
const LANGUAGES = { curl, Python: weft, tritonclient };
