// The second view: what the fleet has learned, followed as long as it is open.
import { AgreementChart, isRefused } from "./agreement_chart.js";
import { button, element, percent, setText } from "./dom.js";
import { authorization, events, problem, Refused } from "./sse.js";

const KEY_NAME = "omnidraft-operator-key";
const NEWEST_EVENTS = 12;
const ALIASES = { champion: "champion: serves", challenger: "challenger: waits for its judgement", previous: "previous champion" };

const at = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEY_NAME) ?? "";
let following = null; // the AbortController of the stream
let charts = [];
let shown = "";

export function openFleet() {
  at("operator-form").hidden = key !== "";
  if (key) follow();
}

export function closeFleet() {
  following?.abort();
  following = null;
}

at("operator-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("operator-key").value;
  openFleet();
});

async function follow() {
  closeFleet();
  const mine = (following = new AbortController());
  setText(at("fleet-status"), "asking log, registry and workers");
  try {
    for await (const [, fleet] of events("page/fleet", null, key, mine.signal)) {
      sessionStorage.setItem(KEY_NAME, key);
      show(fleet);
    }
    setText(at("fleet-status"), "the worker is stopping");
  } catch (error) {
    if (error.name === "AbortError") return;
    setText(at("fleet-status"), told(error));
    at("operator-form").hidden = false;
    key = "";
    sessionStorage.removeItem(KEY_NAME);
  }
}

// Gives an order, after the operator has confirmed it, and shows what came of it.
async function order(kind, target, version = null) {
  const what = version === null ? kind : `${kind} version ${version}`;
  if (!confirm(`${what}: ${target}?`)) return;
  const body = { kind, target, ...(version === null ? {} : { version }) };
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const response = await fetch("page/fleet", { method: "POST", body: JSON.stringify(body), headers });
  if (response.ok) show(await response.json());
  else setText(at("fleet-status"), await problem(response));
}

function told(error) {
  return error instanceof Refused && error.status === 404 ? "This worker has no operator's key, so it shows no fleet." : error.message;
}

function show(fleet) {
  setText(at("fleet-status"), `as of ${new Date(fleet.taken_ms).toLocaleTimeString()}`);
  const news = JSON.stringify({ ...fleet, taken_ms: 0 });
  if (news === shown) return; // what has the keyboard's focus stays
  shown = news;
  charts.forEach((chart) => chart.close());
  charts = [];
  at("fleet-parts").replaceChildren(...problems(fleet), ...fleet.targets.map((each) => target(each, fleet)), log(fleet), workers(fleet));
  charts.forEach((chart) => chart.open());
}

function problems(fleet) {
  return fleet.problems.map((each) => element("p", "verdict is-bad", `cannot be reached: ${each}`));
}

function target(each, fleet) {
  const chart = new AgreementChart(each.history, each.events);
  charts.push(chart);
  const learning = { true: "paused", false: "on" }[each.is_learning_paused] ?? "unknown";
  const lag = each.lag === null ? "unknown" : String(Object.values(each.lag).reduce((sum, part) => sum + part, 0));
  const events = [
    ...(each.canary ? [`canary: version ${each.canary.version} serves ${percent(each.canary.share)} of the requests`] : []),
    ...(each.drifting ?? []).map((drift) => `drift: ${drift.reason || drift.tenant}`),
  ];
  return element("section", "panel", element("h2", "", each.target),
    facts({ learning, "records not learned yet": lag, versions: each.standings === null ? "unknown" : String(each.history.at(-1)?.version ?? 0) }),
    ...events.map((text) => element("p", "verdict is-open", text)), orders(each), chart.root, versions(each), ...happened(each), ...registry(fleet));
}

function orders({ target, is_learning_paused: isPaused, history }) {
  const kind = isPaused ? "resume" : "pause";
  const rollback = button("Roll back to the previous champion", () => order("rollback", target));
  rollback.disabled = !history.some((each) => each.aliases.includes("previous"));
  return element("p", "orders", button(isPaused ? "Resume learning" : "Pause learning", () => order(kind, target)), rollback);
}

function versions({ target, history }) {
  const rows = [...history].reverse().map((each) => [
    String(each.version),
    each.aliases.map((alias) => ALIASES[alias] ?? alias).join(", ") || (isRefused(each) ? "refused" : ""),
    new Date(each.created_ms).toLocaleString(),
    each.num_records.toLocaleString(),
    percent(each.agreement_before),
    `${percent(each.agreement_after)}${each.change_error === null ? "" : ` (error ${percent(each.change_error)})`}`,
    Object.entries(each.losses).map(([name, value]) => `${name} ${value.toFixed(3)}`).join(", "),
    each.aliases.includes("champion") ? "" : button("Promote", () => order("promote", target, each.version)),
    each.judgement ?? "",
  ]);
  return table(["version", "name", "made", "records", "agreement before", "after", "losses", "", "judgement"], rows);
}

// The newest events first; the table above has what each version was judged to be.
function happened({ events }) {
  if (!events.length) return [];
  const newest = events.slice(-NEWEST_EVENTS).reverse();
  const rows = newest.map((each) => [new Date(each.at_ms).toLocaleString(), each.kind, String(each.version ?? ""), each.reason]);
  return [table(["time", "event", "version", "why"], rows)];
}

function registry(fleet) {
  if (!fleet.registry) return [];
  const link = element("a", "", "versions and curves in MLflow");
  link.href = fleet.registry;
  link.rel = "noreferrer";
  return [element("p", "notes", link)];
}

function log(fleet) {
  const count = (ends) => (ends === null ? "unknown" : Object.values(ends).reduce((sum, end) => sum + end, 0).toLocaleString());
  const letters = fleet.dead_letters;
  const reasons = letters ? Object.entries(letters.by_reason).map(([reason, number]) => `${reason}: ${number}`).join(", ") : "";
  const dead = letters === null ? "unknown" : `${letters.number}${reasons && ` (${reasons})`}`;
  return element("section", "panel", element("h2", "", "Log"), facts({ "trace records": count(fleet.trace_ends), "dead letters": dead }));
}

function workers(fleet) {
  const rows = fleet.workers.flatMap((worker) => {
    const state = [worker.url, worker.problem ?? "ready"];
    if (!worker.served.length) return [[...state, "", "", "", "", ""]];
    return worker.served.map((each) => [...state, each.target, each.version === null ? "as it comes" : String(each.version),
      String(each.num_requests), percent(each.agreement), each.tokens_per_pass === null ? "-" : each.tokens_per_pass.toFixed(2)]);
  });
  return element("section", "panel", element("h2", "", "Workers"),
    table(["worker", "state", "target", "version", "requests", "agreement", "tokens a pass"], rows));
}

function facts(values) {
  const parts = Object.entries(values).map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", value)));
  return element("dl", "tallies", ...parts);
}

function table(names, rows) {
  const head = element("tr", "", ...names.map((name) => element("th", "", name)));
  const body = rows.map((row) => element("tr", "", ...row.map((cell) => element("td", "", cell))));
  return element("div", "table", element("table", "", element("thead", "", head), element("tbody", "", ...body)));
}
