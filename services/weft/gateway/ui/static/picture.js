// A graph's picture, alive: numbers at its steps, edges as thick as their traffic, the path of one request.

import { num, percent, put } from "./dom.js";

const policy = globalThis.trustedTypes?.createPolicy("picture", { createHTML: (svg) => svg }); // the server escapes it
const FAILING = 0.01; // share of a step's runs
const [SLOW_MS, SLOW] = [20, 3]; // a p99 from there on, and so many times the median
const LEAST = 0.75; // a wide picture shrinks to that, then it scrolls
const [THIN_PX, THICK_PX] = [1.2, 5];

export class Picture {
  /** `steps` as `/ui/api/graphs` has them; `pick(path)` is called when one is chosen. */
  constructor({ svg, steps }, pick = () => {}) {
    const markup = policy?.createHTML(svg) ?? svg;
    this.node = document.importNode(new DOMParser().parseFromString(markup, "image/svg+xml").documentElement, true);
    this.node.setAttribute("role", "group");
    this.node.style.minWidth = `${LEAST * this.node.getAttribute("width")}px`;
    const arrow = this.node.querySelector("marker"); // of one size, however thick its edge is
    for (const [name, value] of [["markerUnits", "userSpaceOnUse"], ["markerWidth", 12], ["markerHeight", 12]]) arrow?.setAttribute(name, value);
    this.steps = new Map(steps.map((step) => [step.path, step]));
    this.boxes = [...this.node.querySelectorAll("g[data-step][data-role]")];
    this.edges = [...this.node.querySelectorAll("g[data-from]")];
    for (const box of this.boxes) {
      const path = box.dataset.step;
      box.setAttribute("role", "button");
      box.setAttribute("tabindex", "0");
      box.addEventListener("click", () => pick(path));
      box.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pick(path);
      });
    }
    this.#write(() => [""]);
  }

  select(path) {
    for (const box of this.boxes) box.setAttribute("aria-pressed", String(box.dataset.step === path));
  }

  /** Shows what happens now: `graph` of `looked_at`, and the rows of models. */
  update(graph, models) {
    this.#write((path) => {
      const now = graph.steps[path];
      if (!now?.rate) return ["idle", ["idle"]];
      const step = this.steps.get(path);
      const model = models.find((row) => row.name === step?.model && row.version === step.model_version);
      const failing = now.errors / now.rate;
      const isSlow = now.p99_ms >= SLOW_MS && now.p99_ms >= SLOW * now.p50_ms;
      const lines = [
        [`${num(now.rate)}/s`, now.share != null && percent(now.share), failing >= FAILING && `▲ ${percent(failing)} fail`],
        [`${isSlow ? "◆ " : ""}p50 ${num(now.p50_ms)}`, `p99 ${num(now.p99_ms)} ms`],
        [now.accepted != null && `accepts ${percent(now.accepted)}`, model?.queue && `queue ${model.queue}`,
          model?.batch > 1 && `batch ${num(model.batch)}`],
      ];
      return [failing >= FAILING ? "failing" : isSlow ? "slow" : "", ...lines];
    });
    for (const edge of this.edges) {
      const share = Math.min((graph.steps[edge.dataset.step]?.rate ?? 0) / Math.max(graph.rate, 0.001), 1);
      edge.querySelector("path").style.strokeWidth = `${THIN_PX + (THICK_PX - THIN_PX) * Math.sqrt(share)}px`;
    }
  }

  /** Shows the way of one request by the entries of its trace. */
  mark(entries) {
    const last = new Map(entries.map((entry) => [entry.path, entry]));
    const kind = (path) => {
      const status = last.get(path)?.status ?? "SKIPPED";
      return status === "OK" ? "taken" : status === "SKIPPED" ? "skipped" : "failed";
    };
    this.#write((path) => {
      const entry = last.get(path);
      const text = { taken: `✓ ${num(entry?.ms)} ms`, skipped: "○ not taken", failed: `▲ ${entry?.status}` };
      return [kind(path), [text[kind(path)]]];
    });
    for (const edge of this.edges) if (edge.dataset.step) edge.setAttribute("class", kind(edge.dataset.step));
  }

  /** `tell(path)`: the class of a step, and the parts of its lines. */
  #write(tell) {
    for (const box of this.boxes) {
      const [kind, ...lines] = tell(box.dataset.step);
      const texts = lines.map((parts) => parts.filter(Boolean).join(" · "));
      box.setAttribute("class", kind);
      box.setAttribute("aria-label", `${box.dataset.step}: ${texts.filter(Boolean).join("; ")}`);
      box.querySelectorAll("text.live").forEach((node, i) => put(node, texts[i] ?? ""));
    }
  }
}
