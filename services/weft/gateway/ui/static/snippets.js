// A request of the form as a command or a program.

import { address, encode, key } from "./api.js";

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const json = (value) => JSON.stringify(value, (name, part) => (name === "raw" || name === "file" ? undefined : part));

/** A value as Python writes it. */
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map((pair) => pair.map(python).join(": ")).join(", ")}}`;
  return { true: "True", false: "False", null: "None" }[value] ?? JSON.stringify(value);
}

const data = ({ file, data: values }) => (file ? `[open(${python(file)}, "rb").read()]` : python(values));

function curl({ name, inputs, parameters, headers, isStream }) {
  const fields = Object.fromEntries(inputs.map((input) => [input.name, input.data]));
  const file = inputs.find((input) => input.file)?.file; // the only input, then
  const lines = Object.entries(headers).map((pair) => `-H ${shell(pair.join(": "))}`);
  if (key()) lines.push('-H "authorization: Bearer $WEFT_KEY"');
  if (file) lines.push("-H 'inference-header-content-length: 0'", `--data-binary ${shell(`@${file}`)}`);
  else lines.push("-H 'content-type: application/json'", `-d ${shell(json(isStream ? { ...fields, parameters } : { inputs, parameters }))}`);
  return [`curl -N ${shell(address(`v2/models/${encode(name)}/${isStream ? "generate_stream" : "infer"}`))}`, ...lines].join(" \\\n  ");
}

function weft({ name, inputs, parameters, headers, isStream }) {
  const values = inputs.map((input) => `${python(input.name)}: np.reshape(${data(input)}, ${python(input.shape)})`).join(", ");
  const call = `(**{${values}}, parameters=${python(parameters)}, headers=${python(headers)})`;
  return `import numpy as np\nimport weft\n\nwith weft.connect("127.0.0.1:8001") as client:  # the router\n` + (isStream
    ? `    for part in client[${python(name)}].stream${call}:\n        print(dict(part))\n`
    : `    answer = client[${python(name)}]${call}\n    print(dict(answer), answer.path)\n`);
}

function tritonclient({ name, inputs, parameters, headers }) {
  return ["import numpy as np", "import tritonclient.http as http", "from tritonclient.utils import triton_to_np_dtype", "",
    `client = http.InferenceServerClient("${new URL(address("")).host}")`, "inputs = []", ...inputs.map((input) =>
      `inputs.append(http.InferInput(${python(input.name)}, ${python(input.shape)}, "${input.datatype}"))\n`
      + `inputs[-1].set_data_from_numpy(np.array(${data(input)}, triton_to_np_dtype("${input.datatype}")).reshape(${python(input.shape)}))`),
    `print(client.infer(${python(name)}, inputs, parameters=${python(parameters)}, headers=${python(headers)}).get_response())`, ""].join("\n");
}

/** By name: the text for a request. */
export const LANGUAGES = { curl, Python: weft, tritonclient };
