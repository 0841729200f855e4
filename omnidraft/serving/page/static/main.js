// The page: it asks twice, once without drafting, and lets both answers be compared.
import { authorization, events, problem, Refused } from "./sse.js";
import { nextFrame, setText } from "./dom.js";
import { followToken, hideDetails } from "./details.js";
import { restored, Run } from "./run.js";
import { fillLegend } from "./sources.js";

const MOST_RUNS = 8;
const NUM_LIKELIEST = 10;
const KEY_NAME = "omnidraft-key";
const JSON_FORM = {
  type: "json_schema",
  json_schema: {
    name: "answer",
    schema: {
      type: "object",
      properties: { answer: { type: "string" }, reason: { type: "string" } },
      required: ["answer", "reason"],
      additionalProperties: false,
    },
  },
};

const at = (id) => document.getElementById(id);
const runs = [];
let key = sessionStorage.getItem(KEY_NAME) ?? "";
let current = null; // the AbortController of the question under way

async function loadModels() {
  const response = await fetch("v1/models", { headers: authorization(key) });
  at("key-form").hidden = response.status !== 401;
  if (!response.ok) return setText(at("status"), await problem(response));
  setText(at("status"), "");
  const { data } = await response.json();
  at("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
}

function asked() {
  return {
    question: at("question").value,
    target: at("model").value,
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    maxTokens: Number(at("max-tokens").value),
    form: at("form").value,
    isStored: at("store").checked,
  };
}

// The plain lane is never stored: a memory of it would draft the other one. Nor do the two share keys of the prompt.
function body(question, isPlain) {
  return {
    model: question.target,
    messages: [{ role: "user", content: question.question }],
    temperature: question.temperature,
    seed: question.seed,
    max_tokens: question.maxTokens,
    speculation: isPlain ? "off" : "auto",
    store: !isPlain && question.isStored,
    cache_salt: [...crypto.getRandomValues(new Uint32Array(4))].join("-"),
    logprobs: true,
    top_logprobs: NUM_LIKELIEST,
    ...(question.form === "json" ? { response_format: JSON_FORM } : {}),
  };
}

async function ask() {
  const question = asked();
  current = new AbortController();
  setBusy(true);
  const run = new Run(question);
  addRun(run);
  try {
    await measure(run, true, "measuring plain decoding, alone");
    await measure(run, false, "measuring drafted decoding, alone");
    run.finish();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) run.replay();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) at("key-form").hidden = false;
    run.fail(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    setBusy(false);
    setText(at("status"), "");
  }
}

async function measure(run, isPlain, what) {
  const lane = isPlain ? run.plain : run.drafted;
  run.progress(what);
  setText(at("status"), what);
  for await (const [name, data] of events("page/passes", body(run.asked, isPlain), key, current.signal)) {
    if (name === "queued") run.tell({ drafter: data.drafter });
    else if (name === "pass") lane.add(data);
    else if (name === "end") lane.finish(data);
    else throw new Error(data.error.message);
  }
  if (lane.end === null) throw new Error("the worker went away");
  run.tell({ snapshot: lane.end.snapshot_version });
}

function addRun(run) {
  runs.unshift(run);
  at("runs").prepend(run.root);
  for (const old of runs.splice(MOST_RUNS)) old.remove();
  at("replay-all").hidden = runs.length < 2;
  at("save").hidden = false;
}

function setBusy(isBusy) {
  at("send").disabled = isBusy;
  at("cancel").hidden = !isBusy;
}

function save() {
  const whole = runs.filter((run) => run.isFinished).map((run) => run.recording());
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ omnidraft_recordings: whole })], { type: "application/json" }));
  link.download = "omnidraft-recordings.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function open(file) {
  try {
    const { omnidraft_recordings: recordings } = JSON.parse(await file.text());
    for (const recording of recordings.slice(0, MOST_RUNS).reverse()) {
      for await (const run of restored(recording)) {
        if (run !== null) {
          addRun(run);
          run.finish();
        }
        await nextFrame();
      }
    }
    const opened = recordings.length === 1 ? "1 recording" : `${recordings.length} recordings`;
    setText(at("status"), `${opened} opened: measured elsewhere, compared here`);
  } catch (error) {
    setText(at("status"), `not a recording of this page: ${error.message}`);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("send").disabled) ask();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem(KEY_NAME, key);
  loadModels();
});
at("cancel").addEventListener("click", () => current.abort());
at("show-rejected").addEventListener("change", (event) => at("runs").classList.toggle("show-rejected", event.target.checked));
at("replay-all").addEventListener("click", async () => {
  for (const run of runs.filter((each) => each.isFinished)) {
    run.restart();
    await nextFrame();
  }
});
at("save").addEventListener("click", save);
at("open").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => at("file").files.length && open(at("file").files[0]));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideDetails();
  if (event.key !== " " || event.target.closest("input, textarea, select, button, a, summary")) return;
  event.preventDefault();
  const run = runs.find((each) => each.root.contains(event.target)) ?? runs[0];
  if (run?.isFinished) run.toggle();
});
document.addEventListener("scroll", followToken, { passive: true, capture: true });

fillLegend(at("legend"));
loadModels();
