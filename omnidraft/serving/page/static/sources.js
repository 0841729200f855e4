// Who drafted a token: its name, and what is meant. Colours and underlines are in page.css, by the same names.
import { element } from "./dom.js";

export const SOURCES = {
  direct: ["guessed by the small model", "one token of the drafter is one token of the target"],
  split: ["guessed, split", "one token of the drafter is several tokens of the target"],
  merge: ["guessed, merged", "several tokens of the drafter are one token of the target"],
  memory: ["copied from earlier text", "it followed the same tokens before, in this text or in an earlier one of the tenant"],
  forced: ["forced by the grammar", "the only token that the grammar allows"],
  target: ["large model itself", "nobody drafted it: the pass drew it after the last draft that held"],
};

const NAMED = { lookup: "memory", suffix: "memory", prediction: "memory" };

export function sourceOf(nodeSource) {
  return NAMED[nodeSource] ?? nodeSource;
}

export function fillLegend(list) {
  for (const [name, [label, meaning]] of Object.entries(SOURCES)) {
    const item = element("li", "", element("span", `token ${name}`, label));
    item.title = meaning;
    list.append(item);
  }
}
