// The shell: which view is shown, the connection, the key.
import { ask, h, keep, key, latest, live, num, put, watch } from "./base.js";
import { graphs } from "./graphs.js";
import { api, models, requests } from "./tables.js";
import { attempt } from "./try.js";

const VIEWS = { graphs, try: attempt, requests, models, api };
const [main, link, banner, total] = ["main", "link", "banner", "total"].map((id) => document.getElementById(id));
let [leave, shown] = [new AbortController(), ""];

/** Shows the view of the address; a view's listeners end with its signal. */
async function show() {
  if (location.hash && !location.hash.startsWith("#/")) return; // the link to the content
  leave.abort();
  const { signal } = (leave = new AbortController());
  delete main.dataset.view;
  try {
    const [name, ...rest] = (location.hash || "#/graphs").slice(2).split("/").map(decodeURIComponent);
    for (const one of document.querySelectorAll("nav a.view"))
      one.setAttribute("aria-current", one.hash === `#/${name}` ? "page" : "false");
    if (shown !== name) put(main, h("p.note", {}, "Loading…"));
    if (shown && shown !== name) main.focus({ preventScroll: true });
    shown = name;
    document.title = `${[name, ...rest].join(" ")} · Weft`;
    if (name !== "graphs") watch([]);
    while (!latest.state) await new Promise((done) => live.addEventListener("state", done, { once: true, signal }));
    await (VIEWS[name] ?? graphs)(main, rest, signal);
    if (!signal.aborted) main.dataset.view = name;
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(h("p.note", { role: "alert" }, `▲ ${error.message}`));
  }
}

function state(text, kind, problem = "") {
  put(link, text);
  link.className = `pill ${kind}`;
  put(banner, problem);
  banner.hidden = !problem;
}

async function enterKey(why) {
  const value = await ask("Key", `${why} It is kept in this tab alone.`, "Use it", { key: true });
  if (!value) return;
  keep(value);
  watch();
  await show();
}
document.getElementById("key-button").addEventListener("click", () => enterKey("The key of your calls."));

live.addEventListener("state", () => state("● live", "good"));
live.addEventListener("tick", ({ detail: { total: now } }) =>
  put(
    total,
    [
      `${num(now.rate)} requests/s`,
      `${num(now.mean_ms)} ms`,
      `${num(now.inflight)} in flight`,
      ...(now.errors ? [`▲ ${num(now.errors)} errors/s`] : []),
    ].join(" · "),
  ),
);
live.addEventListener("down", ({ detail: { reason } }) =>
  state("▲ away", "bad", `▲ Weft is not reachable: ${reason}. What is shown is old; it is tried again.`),
);
live.addEventListener("denied", ({ detail: { reason } }) => {
  state("▲ no access", "bad", `▲ ${reason}`);
  void enterKey(`${reason}.${key() ? " Enter another key." : ""}`);
});
addEventListener("hashchange", show);
watch();
void show();
