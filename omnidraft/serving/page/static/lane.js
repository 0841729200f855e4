// One text, recorded pass by pass, and shown up to any moment of its clock.
import { PassChart } from "./pass_chart.js";
import { element, setText, visible } from "./dom.js";
import { hideDetails, showDetails } from "./details.js";
import { sourceOf } from "./sources.js";

const TALLIES = ["seconds", "tokens/s", "tokens a pass", "passes"];

export class Lane {
  constructor(title, isPlain) {
    this.isPlain = isPlain;
    this.passes = [];
    this.end = null;
    this.numShown = 0;
    this.#groups = [];
    this.#firsts = [0];
    this.#text = element("div", "text");
    this.#text.tabIndex = 0;
    this.#text.setAttribute("role", "group");
    this.#text.setAttribute("aria-label", `${title}: text; arrow keys move from token to token`);
    this.#tallies = Object.fromEntries(TALLIES.map((name) => [name, element("dd", "", "-")]));
    const tallies = element("dl", "tallies", ...TALLIES.map((name) => element("div", "", element("dt", "", name), this.#tallies[name])));
    this.chart = new PassChart(this.passes, title);
    this.root = element("section", isPlain ? "lane plain" : "lane drafted", element("h3", "", title), tallies, this.#text, this.chart.root);
    this.#listen();
  }

  #groups; #firsts; #text; #tallies; #offsets = []; #active = null;

  get durationMs() {
    return this.passes.at(-1)?.at_ms ?? 0;
  }

  get ids() {
    return this.end?.ids ?? null;
  }

  get isShared() {
    return this.passes.some((pass) => pass.is_shared);
  }

  // Adds a pass that has just come, and shows it.
  add(pass) {
    const number = this.passes.push(pass) - 1;
    this.#firsts.push(this.#firsts[number] + pass.tokens.length);
    const group = element("span", "pass");
    pass.tokens.forEach((token, index) => {
      for (const chain of this.#rejectedChains(pass, index)) group.append(element("s", "rejected", chain));
      group.append(this.#tokenElement(pass, number, index));
    });
    this.#groups.push(group);
    this.#text.append(group);
    this.numShown = this.passes.length;
    this.#tally(pass.at_ms);
  }

  finish(end) {
    this.end = end;
    let offset = 0;
    for (const token of this.flatTokens()) {
      this.#offsets.push(offset);
      offset += token.num_bytes;
    }
  }

  // Shows what had been drawn at this moment.
  show(clockMs) {
    let num = this.numShown;
    while (num < this.passes.length && this.passes[num].at_ms <= clockMs) this.#groups[num++].classList.remove("later");
    while (num > 0 && this.passes[num - 1].at_ms > clockMs) this.#groups[--num].classList.add("later");
    this.numShown = num;
    this.#tally(clockMs);
  }

  mark(position) {
    this.#text.querySelectorAll(".token")[position]?.classList.add("differs");
  }

  flatTokens() {
    return this.passes.flatMap((pass) => pass.tokens);
  }

  firstTokenOf(number) {
    return this.#firsts[number];
  }

  sourceAt(pass, index) {
    const { node } = pass.tokens[index];
    return node === null ? "target" : sourceOf(pass.nodes[node - 1].source);
  }

  // The drafted nodes that the target refused in favour of this token.
  rejectedAt(pass, index) {
    const from = index === 0 ? 0 : pass.tokens[index - 1].node;
    return pass.nodes.filter((node) => node.parent === from && !node.is_accepted);
  }

  // The drafter's tokens that share bytes with this one; null where they are not known.
  drafterTokensOf(token) {
    const pieces = this.end?.drafter_tokens ?? null;
    if (pieces === null) return null;
    const start = this.#offsets[this.flatTokens().indexOf(token)];
    const found = [];
    let offset = 0;
    for (const piece of pieces) {
      if (offset < start + token.num_bytes && offset + piece.num_bytes > start) found.push(piece);
      offset += piece.num_bytes;
    }
    return found;
  }

  #tally(clockMs) {
    const num = this.#firsts[this.numShown];
    const seconds = (this.numShown === this.passes.length ? this.durationMs : clockMs) / 1000;
    setText(this.#tallies.seconds, seconds.toFixed(1));
    setText(this.#tallies["tokens/s"], num ? (num / seconds).toFixed(1) : "-");
    setText(this.#tallies["tokens a pass"], this.numShown ? (num / this.numShown).toFixed(2) : "-");
    setText(this.#tallies.passes, String(this.numShown));
  }

  #tokenElement(pass, number, index) {
    const token = pass.tokens[index];
    const made = element("span", `token ${this.sourceAt(pass, index)}`, token.text);
    if (token.num_bytes === 0) made.classList.add("end");
    made.dataset.pass = number;
    made.dataset.token = index;
    return made;
  }

  // Each refused draft at this position, spelled on to the end of its first branch.
  #rejectedChains(pass, index) {
    return this.rejectedAt(pass, index).map((node) => {
      let spelled = "";
      for (let at = pass.nodes.indexOf(node) + 1; at > 0; at = pass.nodes.findIndex((other) => other.parent === at) + 1) {
        spelled += pass.nodes[at - 1].spelled;
      }
      return visible(spelled);
    });
  }

  #listen() {
    const reveal = (event) => {
      const token = event.target.closest(".token");
      if (token) this.#activate(token);
    };
    this.#text.addEventListener("pointerover", reveal);
    this.#text.addEventListener("click", reveal);
    this.#text.addEventListener("pointerleave", hideDetails);
    this.#text.addEventListener("focus", () => this.#active && this.#activate(this.#active));
    this.#text.addEventListener("blur", hideDetails);
    this.#text.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #activate(token) {
    this.#active = token;
    showDetails(this, Number(token.dataset.pass), Number(token.dataset.token), token);
  }

  #onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideDetails();
    if (step === undefined) return;
    event.preventDefault();
    const tokens = [...this.#text.querySelectorAll(".pass:not(.later) .token")];
    const at = this.#active ? tokens.indexOf(this.#active) + step : 0;
    const next = tokens[Math.max(0, Math.min(at, tokens.length - 1))];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    this.#activate(next);
  }
}
