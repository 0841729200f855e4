// Milliseconds of each pass as stacked bars: drafter, target, bookkeeping. uPlot draws them.
import { cssColour, element, milliseconds, setText } from "./dom.js";

const HEIGHT = 120;
const PARTS = [
  ["bookkeeping", "--other"],
  ["target", "--target-bar"],
  ["drafter", "--draft"],
];
const CUT = 2.5; // times the largest later pass: a first pass beyond it is cut, and told in words

const charts = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));

export class PassChart {
  constructor(passes, title) {
    this.#passes = passes;
    this.#canvas = element("div", "chart");
    this.#canvas.setAttribute("role", "img");
    this.#canvas.setAttribute("aria-label", `${title}: milliseconds of each pass`);
    this.#caption = element("p", "chart-caption");
    this.root = element("figure", "", this.#canvas, this.#caption);
  }

  #passes; #canvas; #caption; #plot = null; #numDrawn = 0; #numWanted = 0; #isVisible = true;

  // The milliseconds that the axis has to hold.
  get maxMs() {
    const totals = this.#passes.map(total);
    const later = Math.max(1, ...totals.slice(1));
    return totals[0] > CUT * later ? later : Math.max(later, totals[0] ?? 0);
  }

  // Begins to draw, with axes that two lanes share.
  open(numPasses, maxMs) {
    this.close();
    this.#numDrawn = this.#numWanted = this.#passes.length;
    this.#plot = new window.uPlot(this.#options(numPasses, maxMs), this.#data(this.#numDrawn), this.#canvas);
    charts.add(this);
    this.#observer.observe(this.#canvas);
    this.#sight.observe(this.#canvas);
    this.#tell(null);
  }

  close() {
    this.#observer.disconnect();
    this.#sight.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
    charts.delete(this);
  }

  // Draws the first passes, as soon as somebody can see it; returns whether anything had to be drawn.
  draw(numPasses) {
    this.#numWanted = numPasses;
    if (!this.isBehind) return false;
    this.#numDrawn = numPasses;
    this.#plot.setData(this.#data(numPasses), false);
    this.#plot.redraw();
    return true;
  }

  get isBehind() {
    return this.#plot !== null && this.#isVisible && this.#numWanted !== this.#numDrawn;
  }

  redraw() {
    this.#plot?.redraw();
  }

  #observer = new ResizeObserver(() => {
    const width = this.#canvas.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  });

  #sight = new IntersectionObserver(([entry]) => {
    this.#isVisible = entry.isIntersecting;
    this.draw(this.#numWanted);
  });

  // The bars lie over each other: the whole, then the whole without bookkeeping, then the drafter alone.
  #data(num) {
    const drawn = (height) => this.#passes.map((pass, index) => (index < num ? height(pass) : null));
    const numbers = this.#passes.map((_, index) => index + 1);
    return [numbers, drawn(total), drawn((pass) => pass.draft_ms + pass.target_ms), drawn((pass) => pass.draft_ms)];
  }

  #options(numPasses, maxMs) {
    const axis = { stroke: () => cssColour("--muted"), ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const paths = window.uPlot.paths.bars({ size: [0.8, 24] });
    return {
      width: this.#canvas.clientWidth || 320,
      height: HEIGHT,
      padding: [8, 4, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: [0.5, numPasses + 0.5] }, y: { range: [0, maxMs * 1.05] } },
      axes: [
        { ...axis, size: 20, gap: 2, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : "")) },
        { ...axis, size: 34, gap: 2, grid: { stroke: () => cssColour("--line"), width: 1 } },
      ],
      series: [{}, ...PARTS.map(([label, colour]) => ({ label, paths, points: { show: false }, width: 0, fill: () => cssColour(colour) }))],
      hooks: { setCursor: [(plot) => this.#tell(plot.cursor.idx)] },
    };
  }

  #tell(index) {
    const pass = index === null || index === undefined ? null : this.#passes[index];
    setText(this.#caption, pass ? `pass ${index + 1}: ${parts(pass)}` : `a pass in the mean: ${parts(mean(this.#passes))}`);
  }
}

function total(pass) {
  return pass.draft_ms + pass.target_ms + pass.other_ms;
}

function parts(pass) {
  return `drafter ${milliseconds(pass.draft_ms)}, target ${milliseconds(pass.target_ms)}, bookkeeping ${milliseconds(pass.other_ms)}`;
}

function mean(passes) {
  const sum = (name) => passes.reduce((total, pass) => total + pass[name], 0) / Math.max(passes.length, 1);
  return { draft_ms: sum("draft_ms"), target_ms: sum("target_ms"), other_ms: sum("other_ms") };
}
