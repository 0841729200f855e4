// Elements whose text is always inserted as text.

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function button(text, onClick, className = "") {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// Colours are read once per scheme: each reading would make the browser compute all styles.
const colours = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());

export function cssColour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}

// A token's bytes with white space that can be seen.
export function visible(spelled) {
  return spelled.replaceAll("\n", "\\n").replaceAll("\t", "\\t").replaceAll(" ", "\u00b7") || "end of text";
}

export const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));

export const percent = (share) => (share === null || share === undefined ? "unknown" : `${(share * 100).toFixed(1)} %`);

export const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(0)} ms`);
