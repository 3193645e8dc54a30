// The shell: which view is shown, the connection, the key.
import { ask, h, num, put } from "./dom.js";
import { graphs } from "./graphs.js";
import { keep, key, latest, on, watch } from "./mesh.js";
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
    if (shown !== name) main.replaceChildren(h("p.note", "Loading…"));
    if (shown && shown !== name) main.focus({ preventScroll: true });
    shown = name;
    document.title = `${[name, ...rest].join(" ")} · Weft`;
    if (name !== "graphs") watch([]);
    if (!latest.state) await new Promise((done) => on("state", done, signal));
    await (VIEWS[name] ?? graphs)(main, rest, signal);
    if (!signal.aborted) main.dataset.view = name;
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(h("p.note", { role: "alert" }, `▲ ${error.message}`));
  }
}

function say(text, kind, problem = "") {
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

on("state", () => say("● live", "good"));
on("tick", ({ total: { rate, mean_ms, inflight, errors } }) => {
  const parts = [`${num(rate)} requests/s`, `${num(mean_ms)} ms`, `${num(inflight)} in flight`];
  put(total, [...parts, ...(errors ? [`▲ ${num(errors)} errors/s`] : [])].join(" · "));
});
on("down", ({ reason }) =>
  say("▲ away", "bad", `▲ Weft is not reachable: ${reason}. What is shown is old; it is tried again.`),
);
on("denied", ({ reason }) => {
  say("▲ no access", "bad", `▲ ${reason}`);
  void enterKey(`${reason}.${key() ? " Enter another key." : ""}`);
});
addEventListener("hashchange", show);
watch();
void show();
