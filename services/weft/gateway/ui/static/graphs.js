// Graphs: the list with a filter, the chosen one's picture alive, and what stands behind a step.
import {
  bar,
  clock,
  control,
  encode,
  facts,
  folded,
  grid,
  h,
  latest,
  live,
  num,
  percent,
  pill,
  put,
  read,
  scrolled,
  track,
  watch,
} from "./base.js";
import { replicasOf } from "./tables.js";

const FAILING = 0.01; // share of a step's runs
const SLOW = { runs: 20, ms: 20, ofMedian: 3, ofGraph: 0.5 }; // of so many a p99 from there on, as many times the median, and that share of the graph's
const policy = globalThis.trustedTypes?.createPolicy("picture", { createHTML: (svg) => svg }); // the server escapes it
const id = (graph) => `${graph.name}/${graph.version}`;
const place = (graph) => `#/graphs/${encode(graph.name)}/${encode(graph.version)}`;
let list;

export async function graphs(main, [name, version, ...step], signal) {
  const chosen = latest.state.index.find(
    (one) => one.is_graph && (!name || one.name === name) && (!version || one.version === version),
  );
  if (!chosen) throw new Error(name ? `there is no graph '${name}'` : "no graph is served");
  watch([chosen.name]);
  const graph =
    chosen.state === "READY" &&
    (await read(`ui/api/graphs/${encode(chosen.name)}?version=${encode(chosen.version)}`, { signal }));
  list ??= makeList();
  list.choose(chosen);
  main.replaceChildren(
    h(
      "div.graphs",
      {},
      list.node,
      graph
        ? page(graph, step.join("/"), signal)
        : h(
            "section",
            {},
            h("h1", {}, chosen.name, " ", pill(chosen.state)),
            h("p", { role: "alert" }, `It is not served: ${chosen.reason}`),
          ),
    ),
  );
}

/** Made once, so that the filter stays. */
function makeList() {
  const [items, found] = [h("ul"), h("small", { role: "status" })];
  const filter = h("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter graphs",
    oninput: () => sift(),
  });
  let [rows, current] = [new Map(), ""];
  const sift = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const [key, row] of rows) row.hidden = !words.every((word) => key.toLowerCase().includes(word));
    put(found, `${items.querySelectorAll("li:not([hidden])").length} of ${rows.size} graphs`);
  };
  const choose = (graph) => {
    current = id(graph);
    for (const [key, row] of rows) row.firstChild.setAttribute("aria-current", String(key === current));
  };
  const fill = () => {
    rows = new Map(
      latest.state.index
        .filter((one) => one.is_graph)
        .map((graph) => [
          id(graph),
          h(
            "li",
            {},
            h(
              "a",
              { href: place(graph), "aria-current": String(id(graph) === current) },
              h(
                "span",
                {},
                graph.state !== "READY" && h("b.bad", {}, `▲ ${graph.state} `),
                graph.name,
                " ",
                h("small", {}, graph.version),
              ),
              h("span.n"),
            ),
          ),
        ]),
    );
    items.replaceChildren(...rows.values());
    sift();
  };
  live.addEventListener("state", fill);
  live.addEventListener("tick", ({ detail: { graphs } }) => {
    const busy = new Map(graphs.map((graph) => [id(graph), `${graph.errors ? "▲ " : ""}${num(graph.rate)}/s`]));
    for (const [key, row] of rows) put(row.firstChild.lastChild, busy.get(key) ?? "");
  });
  fill();
  return { node: h("nav.list", { "aria-label": "Graphs" }, filter, found, items), choose };
}

function page(graph, step, signal) {
  const [figures, cards, side, made] = [h("p.figures"), h("div.cards"), h("aside"), new Map()];
  let refresh = () => {};
  const pick = (path) => {
    const found = graph.steps.find((one) => one.path === path);
    history.replaceState(null, "", [place(graph), ...(found ? path.split("/").map(encode) : [])].join("/"));
    for (const box of picture.boxes) box.setAttribute("aria-pressed", String(box.dataset.step === path));
    side.hidden = !found;
    refresh = found ? panel(side, found, () => pick("")) : () => {};
    if (latest.tick) tick({ detail: latest.tick });
  };
  const tick = ({ detail: { looked_at: graphs, models, window_s, rollouts = [] } }) => {
    const now = graphs.find((one) => id(one) === id(graph));
    if (!now) return;
    put(
      figures,
      [
        `${num(now.rate)} requests/s`,
        `p50 ${num(now.p50_ms)} ms`,
        `p99 ${num(now.p99_ms)} ms`,
        `${num(now.inflight)} in flight`,
        `${now.errors ? "▲ " : ""}${percent(now.rate ? now.errors / now.rate : 0)} errors`,
      ].join(" · "),
    );
    const modelOf = (one) =>
      models.findLast((row) => row.kind === "model" && row.model === one?.model && row.version === one.model_version);
    picture.update(now, modelOf, window_s);
    refresh(now.steps, modelOf);
    const arms = Object.values(Object.groupBy(now.arms, (arm) => arm.node)).map((all) => [bandit, all[0].node, all]);
    const own = rollouts
      .filter((one) => one.graph === graph.name)
      .map((one) => [rollout, `${one.node} ${one.candidate}`, one]);
    for (const [make, key, value] of [...own, ...arms]) {
      if (!made.has(key)) made.set(key, make(cards.appendChild(h("section")), value));
      made.get(key)(value);
    }
  };
  const picture = new Picture(graph, pick);
  live.addEventListener("tick", tick, { signal });
  pick(step);
  const text = (base64) => new TextDecoder().decode(Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)));
  return h(
    "div.graph",
    {},
    h(
      "div.title",
      {},
      h("h1", {}, graph.name, " ", h("small", {}, `version ${graph.version}`)),
      figures,
      h("a.button", { href: `#/try/${encode(graph.name)}` }, "Try it"),
    ),
    h("div.stage", {}, scrolled("Picture", picture.node), side),
    cards,
    graph.files.map((file) => folded(file.file, h("pre", {}, text(file.text)))),
  );
}

/** The side panel of a step; returns what writes its numbers. */
function panel(side, step, close) {
  const [numbers, more] = [h("div"), h("div")];
  side.setAttribute("aria-label", step.title);
  side.replaceChildren(
    h(
      "div.title",
      {},
      h("h2", {}, step.title),
      h("button", { type: "button", onclick: close, "aria-label": "Close" }, "✕"),
    ),
    numbers,
    facts({
      path: step.path,
      in: `${step.kind} ${step.node}`,
      model: step.model && `${step.model} version ${step.model_version}`,
      target: step.target,
      shadow: step.is_shadow && "its answers are dropped",
      "fallback of": step.fallback_of,
      about: step.lines.join("; "),
    }),
    more,
  );
  if (step.model)
    void model(step).then(
      (parts) => more.replaceChildren(...parts),
      (error) => put(more, `▲ ${error.message}`),
    );
  const rates = (counts = {}) =>
    Object.entries(counts)
      .map(([name, value]) => `${name} ${num(value)}/s`)
      .join(", ");
  return (steps, modelOf) => {
    const now = steps[step.path] ?? {};
    const served = modelOf(step);
    put(
      numbers,
      facts({
        runs: `${num(now.rate ?? 0)}/s`,
        p50: `${num(now.p50_ms)} ms`,
        p99: `${num(now.p99_ms)} ms`,
        share: now.share != null && percent(now.share),
        accepted: now.accepted != null && percent(now.accepted),
        skipped: now.skipped > 0 && `${num(now.skipped)}/s`,
        errors: now.errors ? `▲ ${rates(now.failures)}` : "none",
        events: rates(now.events),
        queue: served && `${num(served.queue_size)}, p99 ${num(served.queue_p99_ms)} ms`,
        batch: served && `${num(served.batch_rows)} rows`,
      }),
    );
  };
}

async function model(step) {
  const path = `v2/models/${encode(step.model)}/versions/${encode(step.model_version)}`;
  const [machines, metadata, config] = await Promise.all(
    ["ui/api/machines", path, `${path}/config`].map((one) => read(one)),
  );
  const replicas = grid("Replicas", { target: null, state: pill });
  replicas.fill(replicasOf(machines).filter((one) => one.target === step.target));
  const tensors = (all) => all.map((one) => `${one.name} ${one.datatype} [${one.shape}]`).join(", ");
  return [
    facts({
      versions: metadata.versions.join(", "),
      platform: metadata.platform,
      takes: tensors(metadata.inputs),
      gives: tensors(metadata.outputs),
    }),
    replicas.node,
    folded("Configuration", h("pre", {}, JSON.stringify(config, null, 2))),
  ];
}

function bandit(card, [{ node }]) {
  const rows = grid("Arms", { node: null });
  card.append(h("h2", {}, `Bandit ${node}`), rows.node);
  return (arms) => rows.fill(arms.map((arm) => ({ ...arm, mean_reward: arm.reward_sum / arm.num_rewards })));
}

/** A rollout: how it stands, why, both sides, its guards, and the buttons that are allowed. */
function rollout(card, { graph, node, candidate }) {
  const [stand, verdict] = [h("div"), h("p")];
  const [sides, guards] = [
    grid("Both sides"),
    grid("Guards", { is_broken: (isBroken) => (isBroken ? "▲ yes" : "no") }),
  ];
  const act = (action, ...question) =>
    h(
      "button",
      {
        type: "button",
        value: action,
        onclick: () => control({ action, name: graph, node, reason: "by hand" }, question.length && question),
      },
      action,
    );
  const buttons = [
    act("pause"),
    act("resume"),
    act(
      "promote",
      `Promote ${candidate}?`,
      "It gets its next share of the requests at once, whatever the guards say.",
      "Promote",
    ),
    act("abort", `Abort ${candidate}?`, "It gets no more requests.", "Abort"),
  ];
  card.append(
    h("h2", {}, `Rollout of ${candidate} at ${node}`),
    stand,
    verdict,
    sides.node,
    guards.node,
    h("menu", { hidden: !latest.state.actions.includes("rollout") }, buttons),
  );
  return (now) => {
    put(
      stand,
      h(
        "div",
        {},
        pill(now.phase),
        ` ${num(now.percent)} % of the requests · step ${now.step + 1} of ${now.num_steps} · since ` +
          clock(now.changed_unix_ns / 1e6),
        track(bar(now.percent / 100)),
      ),
    );
    put(verdict, [...new Set([now.verdict, ...now.history.toReversed()])].join("\n"));
    sides.fill([
      { side: "candidate", ...now.candidate_arm },
      { side: "baseline", ...now.baseline_arm },
    ]);
    guards.fill(now.guard);
    const useless = { PAUSED: "pause", RUNNING: "resume" }[now.phase];
    for (const button of buttons) button.disabled = !useless || button.value === useless;
  };
}

/** A graph's picture: numbers at its steps, edges as thick as their traffic, the path of one request. */
export class Picture {
  /** `steps` as `/ui/api/graphs` has them; `pick(path)` is called when one is chosen. */
  constructor({ svg, steps }, pick = () => {}) {
    const parsed = new DOMParser().parseFromString(policy?.createHTML(svg) ?? svg, "image/svg+xml");
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
      return [
        failing >= FAILING ? "failing" : isSlow ? "slow" : "",
        [
          `${num(now.rate)}/s`,
          now.share != null && percent(now.share),
          failing >= FAILING && `▲ ${percent(failing)} fail`,
        ],
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
