// A graph's picture, alive: numbers at its steps, edges as thick as their traffic, the path of one request.

import { num, percent, put } from "./dom.js";

const FAILING = 0.01; // share of a step's runs
const SLOW = { ms: 20, ofMedian: 3, ofGraph: 0.5 }; // a p99 from there on, as many times the median, and that share of the graph's
const [THIN_PX, THICK_PX] = [1.2, 5];
const LEAST = 0.75; // a wide picture shrinks to that, then it scrolls
const policy = globalThis.trustedTypes?.createPolicy("picture", { createHTML: (svg) => svg }); // the server escapes it

export class Picture {
  /** `steps` as `/ui/api/graphs` has them; `pick(path)` is called when one is chosen. */
  constructor({ svg, steps }, pick = () => {}) {
    const parsed = new DOMParser().parseFromString(policy?.createHTML(svg) ?? svg, "image/svg+xml");
    this.node = document.importNode(parsed.documentElement, true);
    this.node.setAttribute("role", "group");
    this.node.style.minWidth = `${LEAST * this.node.getAttribute("width")}px`;
    this.node.querySelector("marker").setAttribute("markerUnits", "userSpaceOnUse"); // of one size, however thick its edge is
    this.steps = new Map(steps.map((step) => [step.path, step]));
    this.boxes = [...this.node.querySelectorAll("g[data-step][data-role]")];
    this.edges = [...this.node.querySelectorAll("g[data-from][data-step]")];
    for (const box of this.boxes) {
      box.setAttribute("role", "button");
      box.setAttribute("tabindex", "0");
      box.onclick = () => pick(box.dataset.step);
      box.onkeydown = (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pick(box.dataset.step);
      };
    }
    this.#write(() => [""]);
    const centre = (place) => place?.scrollTo((place.scrollWidth - place.clientWidth) / 2, 0);
    requestAnimationFrame(() => centre(this.node.parentElement));
  }

  select(path) {
    for (const box of this.boxes) box.setAttribute("aria-pressed", String(box.dataset.step === path));
  }

  /** Shows what happens now: `graph` of `looked_at`, and `modelOf(step)`, the row of its model. */
  update(graph, modelOf) {
    this.#write((path, role) => {
      const now = graph.steps[path];
      if (!now?.rate) return ["idle", ["idle"]];
      const model = modelOf(this.steps.get(path));
      const failing = now.errors / now.rate;
      const isSlow = role === "step" && now.p99_ms >= Math.max(SLOW.ms, SLOW.ofMedian * now.p50_ms, SLOW.ofGraph * graph.p99_ms);
      return [failing >= FAILING ? "failing" : isSlow ? "slow" : "",
        [`${num(now.rate)}/s`, now.share != null && percent(now.share), failing >= FAILING && `▲ ${percent(failing)} fail`],
        [`${isSlow ? "◆ " : ""}p50 ${num(now.p50_ms)}`, `p99 ${num(now.p99_ms)} ms`],
        [now.accepted != null && `accepts ${percent(now.accepted)}`, model?.queue_size && `queue ${model.queue_size}`,
          model?.batch_rows > 1 && `batch ${num(model.batch_rows)}`]];
    });
    for (const edge of this.edges) {
      const share = Math.min((graph.steps[edge.dataset.step]?.rate ?? 0) / Math.max(graph.rate, 0.001), 1);
      edge.querySelector("path").style.strokeWidth = `${THIN_PX + (THICK_PX - THIN_PX) * Math.sqrt(share)}px`;
    }
  }

  /** Shows the way of one request by the entries of its trace. */
  mark(entries) {
    const last = new Map(entries.map((entry) => [entry.path, entry]));
    const told = (path) => {
      const { status = "SKIPPED", ms } = last.get(path) ?? {};
      if (status === "SKIPPED") return ["skipped", ["○ not taken"]];
      return status === "OK" ? ["taken", [`✓ ${num(ms)} ms`]] : ["failed", [`▲ ${status}`], [`${num(ms)} ms`]];
    };
    this.#write(told);
    for (const edge of this.edges) edge.setAttribute("class", told(edge.dataset.step)[0]);
  }

  /** `tell(path, role)`: the class of a step, and the parts of its lines. */
  #write(tell) {
    for (const box of this.boxes) {
      const { step, role } = box.dataset;
      const [kind, ...lines] = tell(step, role);
      const texts = lines.map((parts) => parts.filter(Boolean).join(" · "));
      box.setAttribute("class", kind);
      box.setAttribute("aria-label", `${step}: ${texts.filter(Boolean).join("; ")}`);
      box.querySelectorAll("text.live").forEach((node, i) => put(node, texts[i] ?? ""));
    }
  }
}
