// Fields of the form: a text, a choice, numbers as JSON, or a file; images become the tensor that is asked for.

import { h } from "./dom.js";

const IMAGES = { FP32: [Float32Array, 1 / 255], UINT8: [Uint8Array, 1] };

/** The field of an input of the configuration; `read()` gives the tensor, null if it is left out. */
export function inputField(spec, isBatched) {
  const datatype = spec.data_type.replace("TYPE_", "").replace("STRING", "BYTES");
  const dims = [...(isBatched ? [-1] : []), ...spec.dims.map(Number)];
  const size = dims.reduce((all, dim) => all * (dim < 0 ? 1 : dim), 1);
  const isText = datatype === "BYTES";
  const image = IMAGES[datatype] && dims.length > 2 && layout(spec.dims.map(Number));
  const isChoice = datatype === "BOOL" && size === 1;
  const example = isText || spec.optional ? "" : JSON.stringify(Array(Math.min(size, 64)).fill(0));
  const field = isChoice ? h("select", {}, ["", "true", "false"].map((value) => h("option", {}, value)))
    : h("textarea", { rows: isText ? 3 : 2, value: example, placeholder: isText ? "text" : "JSON" });
  const file = (isText || image) && h("input", { type: "file", accept: image && "image/*", "aria-label": `File for ${spec.name}` });
  const node = h("label", {}, h("span", {}, spec.name, " ", h("small", {}, `${datatype} [${dims}]`)), field);

  async function read() {
    const head = { name: spec.name, datatype };
    const chosen = file?.files?.[0];
    if (chosen && image) return { ...head, ...(await tensorOf(chosen, image, isBatched, ...IMAGES[datatype])), file: chosen.name };
    if (chosen) {
      const bytes = new Uint8Array(await chosen.arrayBuffer());
      const lead = new Uint8Array(new Uint32Array([bytes.length]).buffer);
      return { ...head, shape: dims.map(() => 1), raw: new Blob([lead, bytes]), file: chosen.name };
    }
    if (field.value === "") {
      if (spec.optional) return null;
      if (!isText) throw new Error(`${spec.name} needs a value`);
    }
    const data = isText && (size === 1 || !field.value.startsWith("[")) ? [field.value] : json(field.value, spec.name);
    const flat = [data].flat(Infinity);
    return { ...head, shape: shapeOf(dims, flat.length), data: flat };
  }
  return { node: h("div.field", {}, node, file), read, isOptional: spec.optional };
}

function json(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} must be JSON: ${error.message}`);
  }
}

/** The first open dimension takes what the others leave. */
function shapeOf(dims, length) {
  const fixed = dims.reduce((all, dim) => all * (dim < 0 ? 1 : dim), 1);
  const open = dims.findLastIndex((dim, i) => dim < 0 && (i > 0 || dims.filter((one) => one < 0).length === 1));
  return dims.map((dim, i) => (dim >= 0 ? dim : i === open ? length / fixed : 1));
}

/** Where channels, height and width of an image are; null if it is none. */
function layout(dims) {
  const [c, h, w] = [1, 3].includes(dims[0]) ? dims : [dims.at(-1), ...dims];
  return dims.length === 3 && [1, 3].includes(c) ? { c, h, w, isFirst: c === dims[0] && [1, 3].includes(dims[0]), dims } : null;
}

async function tensorOf(file, { c, h: height, w: width, isFirst }, isBatched, Kind, scale) {
  const bitmap = await createImageBitmap(file);
  const [rows, columns] = [height < 0 ? bitmap.height : height, width < 0 ? bitmap.width : width];
  const context = new OffscreenCanvas(columns, rows).getContext("2d");
  context.drawImage(bitmap, 0, 0, columns, rows);
  const pixels = context.getImageData(0, 0, columns, rows).data;
  const values = new Kind(c * rows * columns);
  for (let at = 0; at < rows * columns; at += 1) {
    const [red, green, blue] = pixels.subarray(at * 4, at * 4 + 3);
    const channels = c === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    channels.forEach((value, k) => { values[isFirst ? k * rows * columns + at : at * c + k] = value * scale; });
  }
  const shape = isFirst ? [c, rows, columns] : [rows, columns, c];
  return { shape: isBatched ? [1, ...shape] : shape, raw: new Blob([values]) };
}
