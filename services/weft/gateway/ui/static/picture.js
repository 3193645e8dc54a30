// A graph's picture, alive: numbers at its steps, edges as thick as their traffic, the path of one request.

import { num, percent, put } from "./dom.js";

const FAILING = 0.01; // share of a step's runs
const [SLOW_MS, SLOW] = [20, 3]; // a p99 from there on, and so many times the median
const [THIN_PX, THICK_PX] = [1.2, 7];

export class Picture {
  /** `steps` as `/ui/api/graphs` has them; `pick(path)` is called when one is chosen. */
  constructor({ svg, steps }, pick = () => {}) {
    this.node = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
    this.node.setAttribute("role", "group");
    this.steps = new Map(steps.map((step) => [step.path, step]));
    this.boxes = [...this.node.querySelectorAll("g[data-step][data-role]")];
    this.edges = [...this.node.querySelectorAll("g[data-from]")];
    for (const box of this.boxes) {
      const path = box.dataset.step;
      box.setAttribute("role", "button");
      box.setAttribute("tabindex", "0");
      box.setAttribute("aria-label", `step ${path}`);
      box.addEventListener("click", () => pick(path));
      box.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pick(path);
      });
    }
    this.#write(() => []);
  }

  select(path) {
    for (const box of this.boxes) box.setAttribute("aria-pressed", String(box.dataset.step === path));
  }

  /** Shows what happens now: `graph` of `looked_at`, and the rows of models. */
  update(graph, models) {
    this.#write((path) => {
      const now = graph.steps[path];
      if (!now?.rate) return ["idle", "", "is-idle"];
      const step = this.steps.get(path);
      const model = models.find((row) => row.name === step?.model && row.version === step.model_version);
      const failing = now.errors / now.rate;
      const isSlow = now.p99_ms >= SLOW_MS && now.p99_ms >= SLOW * now.p50_ms;
      const first = [`${num(now.rate)}/s`, now.share != null && percent(now.share),
        now.accepted != null && `accepts ${percent(now.accepted)}`, failing >= FAILING && `▲ ${percent(failing)} fail`];
      const second = [`${isSlow ? "◆ " : ""}p50 ${num(now.p50_ms)}`, `p99 ${num(now.p99_ms)} ms`,
        model?.queue && `queue ${model.queue}`, model?.batch > 1 && `batch ${num(model.batch)}`];
      return [first, second, failing >= FAILING ? "is-failing" : isSlow ? "is-slow" : ""];
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
      return status === "OK" ? "is-taken" : status === "SKIPPED" ? "is-skipped" : "is-failed";
    };
    this.#write((path) => {
      const entry = last.get(path);
      const text = { "is-taken": `✓ ${num(entry?.ms)} ms`, "is-skipped": "○ not taken", "is-failed": `▲ ${entry?.status}` };
      return [text[kind(path)], "", kind(path)];
    });
    for (const edge of this.edges) if (edge.dataset.step) edge.setAttribute("class", kind(edge.dataset.step));
  }

  /** `tell(path)`: [first line, second line, class] of a step. */
  #write(tell) {
    for (const box of this.boxes) {
      const [first, second, kind] = tell(box.dataset.step);
      box.setAttribute("class", kind ?? "");
      const lines = [first, second].map((line) => [line ?? ""].flat().filter(Boolean).join(" · "));
      box.querySelectorAll("text.live").forEach((node, i) => put(node, lines[i] ?? ""));
    }
  }
}
