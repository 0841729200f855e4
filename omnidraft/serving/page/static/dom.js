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

export function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));

export const percent = (share) => (share === null || share === undefined ? "unknown" : `${(share * 100).toFixed(1)} %`);

export const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(0)} ms`);
