// What is known of one token, beside it while the pointer or the keyboard is on it.
import { element, milliseconds, percent, visible } from "./dom.js";
import { SOURCES } from "./sources.js";

const panel = document.getElementById("details");
let marked = null;

// Shows token `index` of pass `number` of a lane.
export function showDetails(lane, number, index, at) {
  hideDetails();
  const pass = lane.passes[number];
  panel.replaceChildren(...rows(lane, pass, number, index));
  panel.hidden = false;
  place(at);
  marked = at;
  marked.classList.add("is-marked");
  marked.setAttribute("aria-describedby", "details");
}

export function hideDetails() {
  panel.hidden = true;
  marked?.classList.remove("is-marked");
  marked?.removeAttribute("aria-describedby");
  marked = null;
}

// Keeps the details beside their token while something scrolls.
export function followToken() {
  if (marked) place(marked);
}

function rows(lane, pass, number, index) {
  const token = pass.tokens[index];
  const node = token.node === null ? null : pass.nodes[token.node - 1];
  const name = lane.sourceAt(pass, index);
  const [label, meaning] = lane.isPlain ? ["large model itself", "plain decoding: one token a pass"] : SOURCES[name];
  const title = element("p", "details-title", code(token.spelled), ` id ${token.id}`);
  const facts = element("dl", "");
  addFact(facts, "drafted by", element("span", `token ${name}`, label), element("small", "", meaning));
  addFact(facts, "p, the target's", percent(token.p));
  if (node) {
    addFact(facts, "q, the drafter's", node.q === null ? "none: no model was asked" : percent(node.q));
    addFact(facts, "policy expected", node.expected === null ? "unknown" : `${percent(node.expected)} to be drawn`);
  }
  if (token.likeliest) addFact(facts, "likeliest", ...pairs(token.likeliest.map((each) => [each.spelled, percent(each.p)])));
  const rejected = lane.rejectedAt(pass, index);
  if (rejected.length) addFact(facts, "rejected here", ...pairs(rejected.map((each) => [each.spelled, fate(each)])));
  addFact(facts, "target's tokens", ...neighbours(lane, number, index));
  addFact(facts, "drafter's tokens", ...drafterTokens(lane, pass, index));
  addFact(facts, `pass ${number + 1}`, passText(pass));
  return [title, facts];
}

function passText(pass) {
  const spent = `drafter ${milliseconds(pass.draft_ms)}, target ${milliseconds(pass.target_ms)}, bookkeeping ${milliseconds(pass.other_ms)}`;
  const known = pass.nodes.every((node) => node.expected !== null);
  const expected = known ? `${expectedTokens(pass).toFixed(1)} expected, ` : "";
  return `${expected}${pass.tokens.length} drawn; ${spent}`;
}

// The tokens that the policy expected of a pass: the target's own, and each node with the probability of its path.
function expectedTokens(pass) {
  const values = [1];
  for (const node of pass.nodes) values.push(values[node.parent] * node.expected);
  return values.reduce((sum, value) => sum + value, 0);
}

function fate(node) {
  const q = node.q === null ? "" : `q ${percent(node.q)}, `;
  return `${q}p ${node.p === null ? "small" : percent(node.p)}`;
}

function neighbours(lane, number, index) {
  const flat = lane.flatTokens();
  const at = lane.firstTokenOf(number) + index;
  return flat.slice(Math.max(at - 1, 0), at + 2).map((token) => code(token.spelled, token === flat[at]));
}

function drafterTokens(lane, pass, index) {
  const pieces = lane.drafterTokensOf(pass.tokens[index]);
  if (pieces === null) return ["told at the end of the text"];
  return pieces.length ? pieces.map((piece) => code(piece.spelled)) : ["none"];
}

function pairs(entries) {
  return entries.map(([spelled, text]) => element("span", "pair", code(spelled), ` ${text}`));
}

function code(spelled, isThis = false) {
  return element("code", isThis ? "this" : "", visible(spelled));
}

function addFact(list, name, ...values) {
  list.append(element("dt", "", name), element("dd", "", ...values));
}

function place(at) {
  const token = at.getBoundingClientRect();
  const { width, height } = panel.getBoundingClientRect();
  const left = Math.max(8, Math.min(token.left, window.innerWidth - width - 8));
  const isBelow = token.bottom + height + 12 < window.innerHeight || token.top < height + 12;
  const top = isBelow ? Math.min(token.bottom + 6, window.innerHeight - height - 8) : token.top - height - 6;
  panel.style.left = `${left}px`;
  panel.style.top = `${Math.max(top, 8)}px`;
}
