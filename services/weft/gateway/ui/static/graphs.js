// Graphs: the list with a filter, the chosen one's picture alive, and what stands behind a step.
import { button, clock, facts, folded, h, num, percent, pill, put, scrolled, table } from "./dom.js";
import { control, encode, latest, on, read, watch } from "./mesh.js";

const FAILING = 0.01; // share of a step's runs
const SLOW = { runs: 20, ms: 20, ofMedian: 3, ofGraph: 0.5 }; // of so many a p99 from there on, as many times the median, and that share of the graph's
const STYLE = new CSSStyleSheet(); // of all drawings
document.adoptedStyleSheets.push(STYLE);
const policy = globalThis.trustedTypes?.createPolicy("picture", { createHTML: (svg) => svg }); // the server escapes it
const id = (graph) => `${graph.name}/${graph.version}`;
const place = (graph) => `#/graphs/${encode(graph.name)}/${encode(graph.version)}`;
const mark = (errors) => (errors ? "▲ " : "");

export async function graphs(main, [name, version, ...step], signal) {
  const chosen = latest.state.index.find(
    (one) => one.is_graph && (!name || one.name === name) && (!version || one.version === version),
  );
  if (!chosen) throw new Error(name ? `there is no graph '${name}'` : "no graph is served");
  watch([chosen.name]);
  const path = `ui/api/graphs/${encode(chosen.name)}?version=${encode(chosen.version)}`;
  const shown =
    chosen.state === "READY"
      ? page(await read(path, { signal }), step.join("/"), signal)
      : h("section", [
          h("h1", chosen.name, " ", pill(chosen.state)),
          h("p", { role: "alert" }, `It is not served: ${chosen.reason}`),
        ]);
  current = id(chosen);
  main.replaceChildren(h("div.graphs", list, shown));
  drawList();
}

// The list is made once, so that the filter stays.
let [current, rows] = ["", []];
const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter graphs", oninput: drawList });
const [found, items] = [h("small", { role: "status" }), h("ul")];
const list = h("nav.list", { "aria-label": "Graphs" }, filter, found, items);
on("state", drawList);
on("tick", drawRates);

function drawList() {
  if (!list.isConnected) return;
  const words = filter.value.toLowerCase().split(/\s+/);
  const all = latest.state.index.filter((one) => one.is_graph);
  rows = all.filter((one) => words.every((word) => id(one).toLowerCase().includes(word)));
  const row = (one) => {
    const state = one.state !== "READY" && h("b.bad", `▲ ${one.state} `);
    const name = h("span", state, one.name, " ", h("small", one.version));
    const link = { href: place(one), "aria-current": String(id(one) === current) };
    return h("li", h("a", link, name, h("span.n")));
  };
  put(found, `${rows.length} of ${all.length} graphs`);
  put(items, rows.map(row));
  drawRates();
}

/** Each second; of 1,000 rows a new list takes 100 ms. */
function drawRates() {
  const busy = new Map(latest.tick?.graphs.map((one) => [id(one), `${mark(one.errors)}${num(one.rate)}/s`]));
  items.querySelectorAll(".n").forEach((node, i) => (node.textContent = busy.get(id(rows[i])) ?? ""));
}

function page(graph, path, signal) {
  const [figures, cards, side] = [h("p.figures"), h("div.cards"), h("aside")];
  let [step, model] = [];
  const draw = () => {
    const { looked_at = [], models = [], window_s, rollouts } = latest.tick ?? {};
    const now = looked_at.find((one) => id(one) === id(graph));
    const modelOf = ({ model, model_version }) =>
      models.findLast((row) => row.kind === "model" && row.model === model && row.version === model_version);
    if (now) {
      const { rate, errors, p50_ms, p99_ms, inflight, arms } = now;
      const times = `p50 ${num(p50_ms)} ms · p99 ${num(p99_ms)} ms · ${num(inflight)} in flight`;
      put(figures, `${num(rate)} requests/s · ${times} · ${mark(errors)}${percent(rate ? errors / rate : 0)} errors`);
      picture.update(now, modelOf, window_s);
      const own = rollouts.filter((one) => one.graph === graph.name);
      put(cards, own.map(rollout), Object.entries(Object.groupBy(arms, (arm) => arm.node)).map(bandit));
    }
    if (step) put(side, panel(step, now?.steps[step.path] ?? {}, modelOf(step), model, close));
  };
  const pick = async (path) => {
    const chosen = (step = graph.steps.find((one) => one.path === path));
    history.replaceState(null, "", [place(graph), ...(step ? path.split("/").map(encode) : [])].join("/"));
    for (const box of picture.boxes) box.setAttribute("aria-pressed", String(box.dataset.step === path));
    side.hidden = !step;
    side.setAttribute("aria-label", step?.title ?? "");
    model = null;
    draw();
    if (!step?.model) return;
    const told = await modelBehind(step).catch((error) => ({ error }));
    if (step !== chosen) return;
    model = told;
    draw();
  };
  const close = () => pick("");
  const picture = new Picture(graph, pick);
  void pick(path);
  on("tick", draw, signal);
  const text = (base64) => new TextDecoder().decode(Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)));
  return h("div.graph", [
    h("div.title", [
      h("h1", graph.name, " ", h("small", `version ${graph.version}`)),
      figures,
      h("a.button", { href: `#/try/${encode(graph.name)}` }, "Try it"),
    ]),
    h("div.stage", scrolled("Picture", picture.node), side),
    cards,
    graph.files.map((file) => folded(file.file, h("pre", text(file.text)))),
  ]);
}

async function modelBehind(step) {
  const path = `v2/models/${encode(step.model)}/versions/${encode(step.model_version)}`;
  const all = await Promise.all(["ui/api/machines", path, `${path}/config`].map((one) => read(one)));
  const [{ Replicas: replicas }, metadata, config] = all;
  return { replicas: replicas.filter((one) => one.target === step.target), metadata, config };
}

/** The side panel of a step: what it does `now`, its row of `served` models, and the model as it was read. */
function panel(step, now, served, model, close) {
  const tensors = (all) => all.map((one) => `${one.name} ${one.datatype} [${one.shape}]`).join(", ");
  const rates = (counts = {}) => Object.entries(counts).map(([name, value]) => `${name} ${num(value)}/s`);
  return [
    h("div.title", h("h2", step.title), button("✕", close, { "aria-label": "Close" })),
    facts({
      runs: `${num(now.rate ?? 0)}/s`,
      p50: `${num(now.p50_ms)} ms`,
      p99: `${num(now.p99_ms)} ms`,
      share: now.share != null && percent(now.share),
      accepted: now.accepted != null && percent(now.accepted),
      skipped: now.skipped > 0 && `${num(now.skipped)}/s`,
      errors: now.errors ? `▲ ${rates(now.failures).join(", ")}` : "none",
      events: rates(now.events).join(", "),
      queue: served && `${num(served.queue_size)}, p99 ${num(served.queue_p99_ms)} ms`,
      batch: served && `${num(served.batch_rows)} rows`,
      path: step.path,
      in: `${step.kind} ${step.node}`,
      model: step.model && `${step.model} version ${step.model_version}`,
      target: step.target,
      shadow: step.is_shadow && "its answers are dropped",
      "fallback of": step.fallback_of,
      about: step.lines.join("; "),
      versions: model?.metadata?.versions.join(", "),
      platform: model?.metadata?.platform,
      takes: model?.metadata && tensors(model.metadata.inputs),
      gives: model?.metadata && tensors(model.metadata.outputs),
      problem: model?.error && `▲ ${model.error.message}`,
    }),
    model?.config && [
      table("Replicas", model.replicas, { target: null }),
      folded("Configuration", h("pre", JSON.stringify(model.config, null, 2))),
    ],
  ];
}

function bandit([node, arms]) {
  const rows = arms.map((arm) => ({ ...arm, mean_reward: arm.reward_sum / arm.num_rewards }));
  return h("section", h("h2", `Bandit ${node}`), table("Arms", rows, { node: null }));
}

/** A rollout: how it stands, why, both sides, its guards, and the buttons that are allowed. */
function rollout({ graph, node, candidate, phase, percent, step, num_steps, changed_unix_ns, ...now }) {
  const useless = { PAUSED: "pause", RUNNING: "resume" }[phase];
  const act = (action, why) => {
    const press = () => control({ action, name: graph, node }, why && [`${action} ${candidate}?`, why, action]);
    return button(action, press, { disabled: !useless || action === useless });
  };
  const sides = ["candidate", "baseline"].map((side) => ({ side, ...now[`${side}_arm`] }));
  return h("section", { "aria-label": `Rollout of ${candidate}` }, [
    h("h2", `Rollout of ${candidate} at ${node}`),
    h("p", [
      pill(phase),
      ` ${num(percent)} % of the requests · step ${step + 1} of ${num_steps} · since ${clock(changed_unix_ns / 1e6)} `,
      h("meter", { max: 100, value: percent, "aria-hidden": "true" }),
    ]),
    h("p", [...new Set([now.verdict, ...now.history.toReversed()])].join("\n")),
    table("Both sides", sides),
    table("Guards", now.guard),
    latest.state.actions.includes("rollout") &&
      h("menu", [
        act("pause"),
        act("resume"),
        act("promote", "It gets its next share of the requests at once, whatever the guards say."),
        act("abort", "It gets no more requests."),
      ]),
  ]);
}

/** A graph's picture: numbers at its steps, edges as thick as their traffic, the path of one request. */
export class Picture {
  /** `steps` as `/ui/api/graphs` has them; `pick(path)` is called when one is chosen. */
  constructor({ svg, steps }, pick = () => {}) {
    const [before, style, after] = svg.split(/<\/?style>/); // as an element the policy forbids it
    STYLE.replaceSync(`svg { ${style} }`);
    const markup = policy?.createHTML(before + after) ?? before + after;
    const parsed = new DOMParser().parseFromString(markup, "image/svg+xml");
    this.node = document.importNode(parsed.documentElement, true);
    this.node.setAttribute("role", "group");
    this.node.style.minWidth = `${0.75 * this.node.getAttribute("width")}px`; // a wide one shrinks to that, then it scrolls
    const arrow = { markerUnits: "userSpaceOnUse", markerWidth: 12, markerHeight: 12 }; // of one size, however thick its edge is
    for (const [name, value] of Object.entries(arrow)) this.node.querySelector("marker").setAttribute(name, value);
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
    requestAnimationFrame(() => {
      // the entry to the middle
      const place = this.node.parentElement?.getBoundingClientRect();
      const entry = this.node.querySelector('[data-role="tensors"]')?.getBoundingClientRect();
      if (place && entry) this.node.parentElement.scrollLeft += entry.x + entry.width / 2 - place.x - place.width / 2;
    });
  }

  /** Shows what happens now: `graph` of `looked_at` in so many seconds; `modelOf(step)`, the row of its model. */
  update(graph, modelOf, window_s) {
    this.#write((path, role) => {
      const now = graph.steps[path];
      if (!now?.rate) return ["idle", ["idle"]];
      const model = modelOf(this.steps.get(path));
      const failing = now.errors / now.rate;
      const isSlow =
        role === "step" &&
        now.rate * window_s >= SLOW.runs &&
        now.p99_ms >= Math.max(SLOW.ms, SLOW.ofMedian * now.p50_ms, SLOW.ofGraph * graph.p99_ms);
      const share = now.share != null && percent(now.share);
      return [
        failing >= FAILING ? "failing" : isSlow ? "slow" : "",
        [`${num(now.rate)}/s`, share, failing >= FAILING && `▲ ${percent(failing)} fail`],
        [`${isSlow ? "◆ " : ""}p50 ${num(now.p50_ms)}`, `p99 ${num(now.p99_ms)} ms`],
        [
          now.accepted != null && `accepts ${percent(now.accepted)}`,
          model?.queue_size && `queue ${model.queue_size}`,
          model?.batch_rows > 1 && `batch ${num(model.batch_rows)}`,
        ],
      ];
    });
    for (const edge of this.edges) {
      const share = Math.min((graph.steps[edge.dataset.step]?.rate ?? 0) / Math.max(graph.rate, 0.001), 1);
      edge.querySelector("path").style.strokeWidth = `${1.2 + 3.8 * Math.sqrt(share)}px`;
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
