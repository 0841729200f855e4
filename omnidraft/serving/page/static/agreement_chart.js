// Held-out agreement of each version over time, with its parent's on the same records, and what happened meanwhile.
import { cssColour, element } from "./dom.js";

const HEIGHT = 200;
const MARKS = { drift: "--bad", "drift over": "--good", "rolled back": "--memory", rewound: "--memory" };

export function isRefused(version) {
  return (version.judgement ?? "").startsWith("refused");
}

export class AgreementChart {
  constructor(history, events) {
    this.#history = history.filter((each) => each.agreement_after !== null);
    this.#marks = events.filter((each) => each.kind in MARKS);
    this.#canvas = element("div", "chart");
    this.#canvas.setAttribute("role", "img");
    this.#canvas.setAttribute("aria-label", "Held-out agreement over time; the tables below have versions and events");
    this.root = element("figure", "", this.#canvas, element("p", "chart-caption", this.#caption()));
  }

  #history; #marks; #canvas; #plot = null;

  #caption() {
    if (!this.#history.length) return "no version has been measured yet";
    const marks = this.#marks.length ? "; upright lines: drift (red), its end (green), a rollback or rewind (orange)" : "";
    return `held-out agreement over time: the line is each version's, small points its parent's on the same records, a ring a refused version's, the large point the champion's${marks}`;
  }

  open() {
    if (!this.#history.length) return;
    const column = (value) => this.#history.map(value);
    const after = (holds) => column((each) => (holds(each) ? each.agreement_after * 100 : null));
    const data = [
      column((each) => each.created_ms / 1000),
      after(() => true),
      column((each) => (each.agreement_before === null ? null : each.agreement_before * 100)),
      after(isRefused),
      after((each) => each.aliases.includes("champion")),
    ];
    this.#plot = new window.uPlot(this.#options(data[0]), data, this.#canvas);
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

  #options(times) {
    const stroke = () => cssColour("--muted");
    const grid = { stroke: () => cssColour("--line"), width: 1 };
    const colour = (name) => () => cssColour(name);
    const dots = (name, size, fill = name) => ({ paths: () => null, points: { show: true, size, fill: colour(fill), stroke: colour(name), width: 2 } });
    return {
      width: this.#canvas.clientWidth || 320,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { range: this.#range(times) } },
      axes: [
        { stroke, grid },
        { stroke, grid, size: 56, values: (_, ticks) => ticks.map((tick) => `${tick} %`) },
      ],
      series: [
        {},
        { stroke: colour("--accent"), width: 2, points: { show: true, size: 6, stroke: colour("--accent") } },
        { stroke: colour("--muted"), ...dots("--muted", 5) },
        dots("--bad", 11, "--panel"),
        dots("--good", 12),
      ],
      hooks: { drawAxes: [(plot) => this.#drawMarks(plot)] },
    };
  }

  #range(times) {
    const all = [...times, ...this.#marks.map((each) => each.at_ms / 1000)];
    const [first, last] = [Math.min(...all), Math.max(...all)];
    const margin = Math.max((last - first) * 0.03, 30);
    return [first - margin, last + margin];
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { at_ms, kind } of this.#marks) {
      const x = Math.round(plot.valToPos(at_ms / 1000, "x", true));
      ctx.strokeStyle = cssColour(MARKS[kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}
