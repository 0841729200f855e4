// Held-out agreement of each version, with its parent's on the same records: points for one, a line for the other.
import { cssColour, element } from "./dom.js";

const HEIGHT = 180;

export class AgreementChart {
  constructor(history) {
    this.#history = history.filter((each) => each.agreement_after !== null);
    this.#canvas = element("div", "chart");
    this.#canvas.setAttribute("role", "img");
    this.#canvas.setAttribute("aria-label", "Held-out agreement by version; the table below has the numbers");
    const what = this.#history.length
      ? "held-out agreement by version: the line is each version's, the points its parent's on the same records, the large point the champion's"
      : "no version has been measured yet";
    this.root = element("figure", "", this.#canvas, element("p", "chart-caption", what));
  }

  #history; #canvas; #plot = null;

  open() {
    if (!this.#history.length) return;
    const column = (value) => this.#history.map(value);
    const data = [
      column((each) => each.version),
      column((each) => each.agreement_after * 100),
      column((each) => (each.agreement_before === null ? null : each.agreement_before * 100)),
      column((each) => (each.aliases.includes("champion") ? each.agreement_after * 100 : null)),
    ];
    this.#plot = new window.uPlot(this.#options(), data, this.#canvas);
    this.#observer.observe(this.#canvas);
  }

  close() {
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  #observer = new ResizeObserver(() => {
    const width = this.#canvas.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  });

  #options() {
    const stroke = () => cssColour("--muted");
    const grid = { stroke: () => cssColour("--line"), width: 1 };
    const versions = this.#history.map((each) => each.version);
    const colour = (name) => () => cssColour(name);
    const dots = (name, size) => ({ paths: () => null, points: { show: true, size, fill: colour(name), stroke: colour(name) } });
    return {
      width: this.#canvas.clientWidth || 320,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: [Math.min(...versions) - 0.5, Math.max(...versions) + 0.5] } },
      axes: [
        { stroke, grid, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : "")) },
        { stroke, grid, size: 56, values: (_, ticks) => ticks.map((tick) => `${tick} %`) },
      ],
      series: [
        {},
        { stroke: colour("--accent"), width: 2, points: { show: true, size: 6, stroke: colour("--accent") } },
        { stroke: colour("--muted"), ...dots("--muted", 5) },
        { stroke: colour("--good"), ...dots("--good", 12) },
      ],
    };
  }
}
