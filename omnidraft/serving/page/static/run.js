// One question, answered twice with one seed: measured lane by lane, compared, and replayed on one clock.
import { button, element, setText } from "./dom.js";
import { play, stop } from "./player.js";
import { Lane } from "./lane.js";

const SPEEDS = [0.5, 1, 2, 4];

export class Run {
  constructor(asked) {
    this.asked = asked;
    this.plain = new Lane("Plain decoding", true);
    this.drafted = new Lane("Drafted decoding", false);
    this.clockMs = 0;
    this.#verdict = element("p", "verdict");
    this.#notes = element("p", "notes");
    this.#numbers = element("div", "numbers");
    this.#asked = element("p", "asked", describe(asked));
    this.root = element("article", "run panel", element("h2", "", asked.question), this.#asked,
      this.#verdict, this.#numbers, this.#controls(), element("div", "lanes", this.plain.root, this.drafted.root), this.#notes);
    this.#setVerdict("", "measuring");
  }

  isPlaying = false; isFinished = false; #asked; #verdict; #notes; #numbers; #play; #slider; #time; #speed;

  get lanes() {
    return [this.plain, this.drafted];
  }

  get durationMs() {
    return Math.max(...this.lanes.map((lane) => lane.durationMs));
  }

  get speed() {
    return Number(this.#speed.value);
  }

  // Compares the two texts and opens the charts; replaying is possible from now on.
  finish() {
    const numPasses = Math.max(...this.lanes.map((lane) => lane.passes.length));
    const maxMs = Math.max(...this.lanes.map((lane) => lane.chart.maxMs));
    for (const lane of this.lanes) lane.chart.open(numPasses, maxMs);
    this.#slider.max = Math.ceil(this.durationMs);
    this.#controlsRow.hidden = false;
    this.#compare();
    this.#tellNumbers();
    this.#tellNotes();
    this.isFinished = true;
    this.show(this.durationMs);
    for (const lane of this.lanes) lane.chart.draw(lane.numShown);
  }

  // Adds what the worker told about the answer.
  tell(facts) {
    Object.assign(this.asked, facts);
    setText(this.#asked, describe(this.asked));
  }

  remove() {
    stop(this);
    for (const lane of this.lanes) lane.chart.close();
    this.root.remove();
  }

  fail(message) {
    this.#setVerdict("is-bad", `not compared: ${message}`);
  }

  progress(text) {
    this.#setVerdict("is-open", text);
  }

  show(clockMs) {
    this.clockMs = Math.min(clockMs, this.durationMs);
    for (const lane of this.lanes) lane.show(this.clockMs);
    this.#slider.value = this.clockMs;
    setText(this.#time, `${(this.clockMs / 1000).toFixed(1)} s`);
    this.root.classList.toggle("is-over", this.clockMs >= this.durationMs);
  }

  toggle() {
    if (this.isPlaying) stop(this);
    else this.replay();
  }

  replay() {
    if (this.clockMs >= this.durationMs) this.show(0);
    play(this);
  }

  restart() {
    this.show(0);
    play(this);
  }

  setPlaying(isPlaying) {
    this.isPlaying = isPlaying;
    setText(this.#play, isPlaying ? "Pause" : "Replay");
  }

  recording() {
    const lane = ({ passes, end }) => ({ passes, end });
    return { asked: this.asked, plain: lane(this.plain), drafted: lane(this.drafted) };
  }

  #controlsRow;

  #controls() {
    this.#play = button("Replay", () => this.toggle(), "play");
    this.#slider = element("input", "slider");
    Object.assign(this.#slider, { type: "range", min: 0, max: 1, step: 1, value: 0 });
    this.#slider.setAttribute("aria-label", "Moment of the clock");
    this.#slider.addEventListener("input", () => {
      stop(this);
      this.show(Number(this.#slider.value));
      for (const lane of this.lanes) lane.chart.draw(lane.numShown);
    });
    this.#time = element("output", "time", "0.0 s");
    this.#speed = element("select", "speed", ...SPEEDS.map((speed) => new Option(`${speed}x`, speed, speed === 1, speed === 1)));
    this.#speed.setAttribute("aria-label", "Speed of the replay");
    this.#controlsRow = element("div", "controls", this.#play, this.#slider, this.#time, this.#speed);
    this.#controlsRow.hidden = true;
    return this.#controlsRow;
  }

  #compare() {
    const [plain, drafted] = this.lanes.map((lane) => lane.ids);
    const at = plain.findIndex((id, index) => id !== drafted[index]);
    if (at < 0 && plain.length === drafted.length) {
      return this.#setVerdict("is-good", `identical text, bit for bit: ${plain.length} tokens, each the same id`);
    }
    const position = at < 0 ? plain.length : at;
    for (const lane of this.lanes) lane.mark(position);
    this.#setVerdict("is-bad", `NOT identical: the texts differ from token ${position + 1} on`);
  }

  #tellNumbers() {
    const [plain, drafted] = this.lanes;
    const ratio = plain.durationMs / drafted.durationMs;
    const counts = {};
    for (const pass of drafted.passes) pass.tokens.forEach((_, index) => (counts[drafted.sourceAt(pass, index)] = (counts[drafted.sourceAt(pass, index)] ?? 0) + 1));
    const shares = Object.entries(counts).map(([name, num]) => element("span", `token ${name} count`, `${name} ${num}`));
    const faster = ratio >= 1 ? `${ratio.toFixed(2)}x faster` : `${(1 / ratio).toFixed(2)}x slower`;
    const times = `${(drafted.durationMs / 1000).toFixed(1)} s instead of ${(plain.durationMs / 1000).toFixed(1)} s`;
    this.#numbers.replaceChildren(element("strong", "faster", faster), element("span", "", times), element("span", "shares", ...shares));
  }

  #tellNotes() {
    const isShared = this.lanes.some((lane) => lane.isShared);
    setText(this.#notes, isShared ? "Other texts shared passes with a lane, so these times are not those of a text alone." : "");
  }

  #setVerdict(className, text) {
    this.#verdict.className = `verdict ${className}`;
    setText(this.#verdict, text);
  }
}

// A run that was recorded before, in steps that each fit into a frame.
export async function* restored(recording) {
  const run = new Run(recording.asked);
  for (const name of ["plain", "drafted"]) {
    for (const [number, pass] of recording[name].passes.entries()) {
      run[name].add(pass);
      if (number % 32 === 31) yield null;
    }
    run[name].finish(recording[name].end);
    yield null;
  }
  yield run;
}

function describe({ target, drafter, temperature, seed, snapshot }) {
  const version = snapshot === null || snapshot === undefined ? "as it comes" : `version ${snapshot}`;
  const models = drafter ? `${target}, drafter ${drafter} (${version})` : target;
  return `${models}, temperature ${temperature}, seed ${seed}`;
}
