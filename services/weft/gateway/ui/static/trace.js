// Where each millisecond of one request went.

import { bar, h, num, pill } from "./dom.js";

const USUAL = ["path", "target", "model", "version", "start_ms", "ms", "status", "queue_ms", "compute_ms"];

/** A waterfall of the steps; `total` is the whole time, milliseconds. */
export function waterfall(steps, total = 0) {
  const whole = Math.max(total, ...steps.map((step) => step.start_ms + step.ms), 0.001);
  const rows = steps.map((step) => {
    const depth = step.path.split("/").length - 2;
    const label = step.fallback_of ? `or ${step.path.split(">").at(-1)}` : step.path.split("/").at(-1);
    const queue = step.queue_ms ?? 0;
    const compute = step.compute_ms ?? step.ms - queue;
    const start = (step.start_ms + Math.max(step.ms - queue - compute, 0) / 2) / whole; // the way there and back
    const track = h("div.track", { "aria-hidden": "true" }, bar(step.ms / whole, step.start_ms / whole, "way"),
      queue > 0 && bar(queue / whole, start, "queue"), step.model && bar(compute / whole, start + queue / whole));
    const more = Object.entries(step).filter(([name]) => !USUAL.includes(name)).map(([name, value]) => `${name} ${value}`);
    const parts = step.queue_ms == null ? [] : [`queue ${num(queue)}`, `compute ${num(compute)} ms`];
    const name = h("th", { scope: "row", title: step.path }, label);
    name.style.paddingInlineStart = `${depth}rem`;
    return h("tr", {}, name, h("td.wide", {}, track), h("td.n", {}, `${num(step.ms)} ms`),
      h("td", {}, step.status !== "OK" && pill(step.status), step.model && ` ${step.model} v${step.version} on ${step.target} `,
        h("small", {}, [...parts, ...more].join(" · "))));
  });
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Waterfall" }, h("table.waterfall", {},
    h("caption", {}, `${num(whole)} ms; hatched: in the queue, pale: on the way`), h("tbody", {}, rows)));
}
