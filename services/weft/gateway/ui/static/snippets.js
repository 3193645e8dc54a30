// A request of the form as code.

import { address, encode, key } from "./api.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const python = (value) => JSON.stringify(value).replace(/\b(true|false)\b(?=[,\]}])/g, (word) => word[0].toUpperCase() + word.slice(1));
const nested = ({ shape, data }) => shape.reduceRight((rows, size, i) => (i === 0 ? rows
  : Array.from({ length: rows.length / size }, (_, at) => rows.slice(at * size, (at + 1) * size))), data);

function curl({ name, inputs, parameters, headers, isStream }) {
  const lines = Object.entries(headers).map((pair) => `-H ${quoted(pair.join(": "))}`);
  if (key()) lines.push('-H "authorization: Bearer $WEFT_KEY"');
  const [first] = inputs;
  if (first?.file) lines.push("-H 'inference-header-content-length: 0'", `--data-binary @${quoted(first.file)}`);
  else lines.push("-H 'content-type: application/json'", `-d ${quoted(JSON.stringify(isStream
    ? { ...Object.fromEntries(inputs.map((input) => [input.name, input.data])), parameters } : { inputs, parameters }))}`);
  return [`curl ${isStream ? "-N " : ""}${address(`v2/models/${encode(name)}/${isStream ? "generate_stream" : "infer"}`)}`, ...lines].join(" \\\n  ");
}

function weft({ name, inputs, parameters, headers, isStream }) {
  const values = inputs.map((input) => `${python(input.name)}: ${input.file ? `open(${python(input.file)}, "rb").read()` : python(nested(input))}`);
  const options = `**{${values.join(", ")}}, parameters=${python(parameters)}, headers=${python(headers)}`;
  return `import weft\n\nwith weft.connect("127.0.0.1:8001") as client:  # the router\n` + (isStream
    ? `    for part in client[${python(name)}].stream(${options}):\n        print(dict(part))\n`
    : `    answer = client[${python(name)}](${options})\n    print(dict(answer), answer.path)\n`);
}

function tritonclient({ name, inputs, parameters, headers, isStream }) {
  const lines = inputs.flatMap((input) => [
    `tensor = httpclient.InferInput(${python(input.name)}, ${python(input.shape)}, "${input.datatype}")`,
    `tensor.set_data_from_numpy(np.array(${input.file ? `[open(${python(input.file)}, "rb").read()]` : python(input.data)}, `
      + `triton_to_np_dtype("${input.datatype}")).reshape(${python(input.shape)}))`, "inputs.append(tensor)"]);
  return ["import numpy as np", "import tritonclient.http as httpclient", "from tritonclient.utils import triton_to_np_dtype", "",
    `client = httpclient.InferenceServerClient("${new URL(address("")).host}")`, "inputs = []", ...lines,
    `answer = client.infer(${python(name)}, inputs, headers=${python(headers)}, parameters=${python(parameters)})`,
    "print(answer.get_response())", ""].join("\n");
}

/** Text of a program by its language. */
export const LANGUAGES = { curl, Python: weft, tritonclient };
