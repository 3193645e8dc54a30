// Fields of the form: a text, a choice, numbers as JSON, or a file; images become the tensor that is asked for.

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
export function inputField(spec, isBatched) {
  const datatype = spec.data_type.replace("TYPE_", "").replace("STRING", "BYTES");
  const dims = [...(isBatched ? [-1] : []), ...spec.dims];
  const size = dims.reduce((all, dim) => all * Math.max(dim, 1), 1);
  const isText = datatype === "BYTES";
  const isImage = datatype in IMAGES && spec.dims.length === 3 && [spec.dims[0], spec.dims[2]].some((dim) => dim === 1 || dim === 3);
  const example = isText || spec.optional ? "" : JSON.stringify(Array(Math.min(size, 64)).fill(0));
  const field = datatype === "BOOL" && size === 1 ? h("select", {}, ["", "true", "false"].map((value) => h("option", {}, value)))
    : h("textarea", { rows: 2, value: example, placeholder: isText ? "text" : "JSON" });
  if (spec.name === "stream") field.value = "true"; // of language models: token by token
  const file = (isText || isImage) && h("input", { type: "file", accept: isImage && "image/*", "aria-label": `file for ${spec.name}` });
  const label = h("label", {}, spec.name, " ", h("small", {}, `${datatype} [${dims}]`), field);

  async function read() {
    const head = { name: spec.name, datatype, file: file?.files?.[0]?.name };
    if (head.file && isImage) return { ...head, ...(await imageTensor(file.files[0], spec.dims, isBatched, ...IMAGES[datatype])) };
    if (head.file) return { ...head, shape: dims.map(() => 1), raw: new Blob([new Uint32Array([file.files[0].size]), file.files[0]]) };
    if (field.value === "" && spec.optional) return null;
    const isPlain = isText && (size === 1 || !field.value.startsWith("["));
    const data = [isPlain ? field.value : parsed(field.value, spec.name)].flat(Infinity);
    const open = dims.indexOf(-1, isBatched && dims.lastIndexOf(-1) > 0 ? 1 : 0); // it takes what the others leave
    return { ...head, data, shape: dims.map((dim, i) => (dim >= 0 ? dim : i === open ? data.length / size : 1)) };
  }
  return { node: h("div.field", {}, label, file), read, isOptional: spec.optional };
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
  const values = new Numbers(channels * height * width);
  for (let at = 0; at < height * width; at += 1) {
    const [red, green, blue] = pixels.subarray(at * 4);
    const parts = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    parts.forEach((value, k) => { values[isFirst ? k * height * width + at : at * channels + k] = value * scale; });
  }
  const shape = isFirst ? [channels, height, width] : [height, width, channels];
  return { shape: isBatched ? [1, ...shape] : shape, raw: new Blob([values]) };
}
