// Fields of the form: a text, a choice, numbers as JSON, or a file; and what the form says as a program.

import { address, encode, key } from "./api.js";
import { h } from "./dom.js";

const IMAGES = { FP32: [Float32Array, 1 / 255], UINT8: [Uint8Array, 1] };

export function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

/** The field of an input of the configuration; `read()` gives the tensor, null if it is left out. */
export function inputField({ name, data_type: type, dims: own, optional: isOptional }, isBatched) {
  const datatype = type.replace("TYPE_", "").replace("STRING", "BYTES");
  const dims = [...(isBatched ? [-1] : []), ...own];
  const size = dims.reduce((all, dim) => all * Math.max(dim, 1), 1);
  const isText = datatype === "BYTES";
  const isImage = datatype in IMAGES && own.length === 3 && [own[0], own[2]].some((dim) => dim === 1 || dim === 3);
  const example = isText || isOptional ? "" : JSON.stringify(Array(Math.min(size, 64)).fill(0));
  const field = datatype === "BOOL" && size === 1 ? h("select", {}, ["", "true", "false"].map((value) => h("option", {}, value)))
    : h("textarea", { rows: 2, value: example, placeholder: isText ? "text" : "JSON" });
  if (name === "stream") field.value = "true"; // of language models: token by token
  const file = (isText || isImage) && h("input", { type: "file", accept: isImage && "image/*", "aria-label": `file for ${name}` });

  async function read() {
    const [chosen] = file ? file.files : [];
    const head = { name, datatype, file: chosen?.name };
    if (chosen && isImage) return { ...head, ...(await imageTensor(chosen, own, isBatched, ...IMAGES[datatype])) };
    if (chosen) return { ...head, shape: dims.map(() => 1), raw: new Blob([new Uint32Array([chosen.size]), chosen]) };
    if (field.value === "" && isOptional) return null;
    const data = [isText && (size === 1 || !field.value.startsWith("[")) ? field.value : parsed(field.value, name)].flat(Infinity);
    const open = dims.indexOf(-1, isBatched && dims.lastIndexOf(-1) > 0 ? 1 : 0); // it takes what the others leave
    const shape = dims.map((dim, i) => (dim >= 0 ? dim : i === open ? data.length / size : 1));
    const cut = (rows, length) => Array.from({ length: rows.length / length }, (_, at) => rows.slice(at * length, (at + 1) * length));
    return { ...head, shape, data: shape.slice(1).reduceRight(cut, data) };
  }
  return { node: h("div.field", {}, h("label", {}, name, " ", h("small", {}, `${datatype} [${dims}]`), field), file), read, isOptional };
}

/** Pixels of a picture, channels first or last as `dims` has them. */
async function imageTensor(file, dims, isBatched, Numbers, scale) {
  const bitmap = await createImageBitmap(file);
  const isFirst = dims[0] === 1 || dims[0] === 3;
  const channels = isFirst ? dims[0] : dims[2];
  const [height, width] = (isFirst ? dims.slice(1) : dims).map((dim, i) => (dim < 0 ? [bitmap.height, bitmap.width][i] : dim));
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height).data;
  const values = Numbers.from({ length: channels * height * width }, (_, i) => {
    const [channel, at] = isFirst ? [Math.floor(i / (height * width)), i % (height * width)] : [i % channels, Math.floor(i / channels)];
    const [red, green, blue] = pixels.subarray(4 * at);
    return scale * (channels === 1 ? 0.299 * red + 0.587 * green + 0.114 * blue : [red, green, blue][channel]);
  });
  const shape = isFirst ? [channels, height, width] : [height, width, channels];
  return { shape: isBatched ? [1, ...shape] : shape, raw: new Blob([values]) };
}

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map((pair) => pair.map(python).join(": ")).join(", ")}}`;
  return { true: "True", false: "False", null: "None" }[value] ?? JSON.stringify(value);
}

const array = ({ file, data, shape, datatype }) => `np.array(${file ? `[open(${python(file)}, "rb").read()]` : python(data)}, `
  + `triton_to_np_dtype("${datatype}")).reshape(${python(shape)})`;
const IMPORTS = ["import numpy as np", "from tritonclient.utils import triton_to_np_dtype"];

function curl({ name, inputs, fields, parameters, headers, isStream }) {
  const lines = Object.entries(headers).map((pair) => `-H ${shell(pair.join(": "))}`);
  if (key()) lines.push('-H "authorization: Bearer $WEFT_KEY"');
  if (inputs[0]?.file) lines.push("-H 'inference-header-content-length: 0'", `--data-binary ${shell(`@${inputs[0].file}`)}`); // the only input
  else lines.push("-H 'content-type: application/json'", `-d ${shell(JSON.stringify(isStream ? { ...fields, parameters } : { inputs, parameters }))}`);
  return [`curl -N ${shell(address(`v2/models/${encode(name)}/${isStream ? "generate_stream" : "infer"}`))}`, ...lines].join(" \\\n  ");
}

function weft({ name, inputs, parameters, headers, isStream }) {
  const values = inputs.map((input) => `${python(input.name)}: ${array(input)}`).join(", ");
  const call = `(**{${values}}, parameters=${python(parameters)}, headers=${python(headers)})`;
  return [...IMPORTS, "import weft", "", 'with weft.connect("127.0.0.1:8001") as client:  # the router', ...(isStream
    ? [`    for part in client[${python(name)}].stream${call}:`, "        print(dict(part))"] : [`    print(dict(client[${python(name)}]${call}))`])].join("\n");
}

function tritonclient({ name, inputs, parameters, headers }) {
  return [...IMPORTS, "import tritonclient.http as http", "", `client = http.InferenceServerClient("${new URL(address("")).host}")`,
    `inputs = [${inputs.map((one) => `http.InferInput(${python(one.name)}, ${python(one.shape)}, "${one.datatype}")`).join(", ")}]`,
    ...inputs.map((input, i) => `inputs[${i}].set_data_from_numpy(${array(input)})`),
    `print(client.infer(${python(name)}, inputs, parameters=${python(parameters)}, headers=${python(headers)}).get_response())`].join("\n");
}

/** By name: the text for a request. */
export const LANGUAGES = { curl, Python: weft, tritonclient };
