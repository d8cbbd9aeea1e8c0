// Charts over uPlot: lines, a band, stacked areas, evaluations with error bars; one cursor for all charts of a page.
"use strict";
(() => {
  const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const faded = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // The largest unit that leaves at least one whole; 999.6 k is 1.00 M.
  function scaled(value, base, units) {
    let place = 0;
    while (place < units.length - 1 && Math.abs(value) >= base * (base === 1000 ? 0.9995 : 1)) { value /= base; place += 1; }
    const size = Math.abs(value);
    return value.toFixed(size >= 99.95 || place === 0 ? 0 : size >= 9.995 ? 1 : 2) + units[place];
  }

  function figure(value, unit) {
    if (value === null || value === undefined) return "\u2013";
    const size = Math.abs(value);
    if (unit === "bytes") return scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
    if (size >= 1e15) return value.toExponential(1).replace("e+", "e");
    if (size >= 10000) return scaled(value, 1000, ["", "k", "M", "G", "T"]);
    if (size >= 100) return value.toFixed(0);
    if (size === 0) return "0";
    if (size < 0.001) return value.toExponential(1).replace(".0e", "e");
    return String(Number(value.toPrecision(3)));
  }

  // What stands at the marks of an axis: as short as elsewhere, with more digits where two would read the same.
  function axisMarks(values, unit) {
    const shown = values.map((value) => (value === null ? null : figure(value, unit)));
    const seen = shown.filter((text) => text !== null);
    if (unit === "bytes" || new Set(seen).size === seen.length) return shown;
    return values.map((value) => {
      if (value === null) return null;
      const digits = Number(value.toPrecision(6));
      return Math.abs(digits) >= 10000 && Math.abs(digits) < 1e15 ? `${digits / 1000}k` : String(digits);
    });
  }

  // Steps are whole, however few there are.
  const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  const sync = uPlot.sync("steps");

  // Average over `reach` values on either side, those that there are; it does not lag behind what it averages.
  function smooth(column, reach) {
    const places = column.map((_, i) => i).filter((i) => column[i] !== null && column[i] !== undefined);
    const smoothed = column.map(() => null);
    places.forEach((place, at) => {
      const near = places.slice(Math.max(0, at - reach), at + reach + 1);
      smoothed[place] = near.reduce((sum, i) => sum + column[i], 0) / near.length;
    });
    return smoothed;
  }

  // 1, 2 and 5 of each decade; of many decades only the 1.
  function decades(low, high) {
    const marks = [];
    const digits = high / low > 60 ? [1] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of digits) if (m * 10 ** e >= low && m * 10 ** e <= high) marks.push(m * 10 ** e);
    }
    return marks;
  }

  class MettleChart {
    constructor(holder, spec) {
      this.holder = holder;
      this.spec = spec;
      this.plot = holder.querySelector("[data-plot]");
      this.readout = holder.querySelector("[data-readout]");
      this.evals = [];
      this.data = null;
      new ResizeObserver(() => this.resize()).observe(this.plot);
      window.addEventListener("themechange", () => this.rebuild());
    }

    // `steps` and `columns` as the server sends them; `evals` as [step, mean, low, high, environment].
    set(steps, columns, evals, maxSteps) {
      this.evals = evals || [];
      this.maxSteps = maxSteps;
      this.values = this.spec.series.map((s) => columns[s.key] || []);
      const known = this.values.some((column) => column.some((v) => v !== null));
      this.data = known || this.evals.length ? this.columns(steps, columns) : null;
      if (!this.data) return this.showEmpty();
      if (this.chart) this.chart.setData(this.data); else this.rebuild();
      this.tell(null);
    }

    columns(steps, columns) {
      const kept = this.spec.series.map((s) => columns[s.key] || steps.map(() => null));
      if (this.spec.is_stacked) {
        const sum = steps.map(() => 0);
        const stacked = kept.map((column) => column.map((v, i) => (sum[i] += v || 0)));
        return [steps, ...stacked.reverse()];
      }
      const raw = this.spec.is_log ? kept.map((column) => column.map((v) => (v > 0 ? v : null))) : kept;
      const reach = Math.min(12, Math.round(steps.length / 30));
      const band = this.spec.band ? [columns[this.spec.band[1]], columns[this.spec.band[0]]] : [];
      return [steps, ...raw, ...raw.map((column, i) => (this.spec.series[i].is_dotted ? column.map(() => null) : smooth(column, reach))), ...band];
    }

    showEmpty() {
      if (!this.empty && !this.chart) this.plot.append(this.empty = element("div", "plot-empty", "nothing yet"));
      this.readout.replaceChildren();
    }

    rebuild() {
      if (!this.data) return;
      if (this.empty) { this.empty.remove(); this.empty = null; }
      if (this.chart) this.chart.destroy();
      this.chart = new uPlot(this.options(), this.data, this.plot);
      this.tell(null);
    }

    resize() {
      if (this.chart && this.plot.clientWidth) this.chart.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight });
    }

    lines() {
      const { spec } = this;
      const drawn = spec.is_stacked ? [...spec.series].reverse() : spec.series;
      const plain = { points: { show: false }, spanGaps: true };
      const lines = drawn.map((s, i) => {
        const color = tone(s.tone);
        if (spec.is_stacked) return { ...plain, label: s.label, stroke: color, width: 1, fill: i === drawn.length - 1 ? faded(color, 0.6) : undefined };
        if (s.is_dotted) return { label: s.label, stroke: color, paths: () => null, points: { show: true, size: 3, width: 0, fill: color } };
        return { ...plain, label: s.label, stroke: faded(color, 0.42), width: 1 };
      });
      if (!spec.is_stacked) for (const s of drawn) lines.push({ ...plain, label: "", stroke: tone(s.tone), width: 2 });
      if (spec.band) for (let i = 0; i < 2; i++) lines.push({ label: "", stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
      return lines;
    }

    options() {
      const { spec } = this;
      const axis = { stroke: tone("muted"), font: `11px ${tone("sans")}`, grid: { stroke: tone("line"), width: 1 }, ticks: { show: false } };
      return {
        width: this.plot.clientWidth, height: this.plot.clientHeight, padding: [10, 14, 0, 0],
        legend: { show: false },
        cursor: { y: false, sync: { key: sync.key, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false, uni: 20 } },
        scales: {
          x: { time: false, range: (_, low, high) => this.xRange(low, high) },
          y: spec.is_log ? { distr: 3, range: (_, low, high) => (low === null ? [1e-6, 1] : [low * 0.7, high * 1.4]) } : { range: (_, low, high) => this.yRange(low, high) },
        },
        axes: [
          { ...axis, size: 24, gap: 4, space: 60, incrs: WHOLE, grid: { show: false }, label: spec.x || "step", labelSize: 14, labelGap: 0, labelFont: `11px ${tone("sans")}` },
          { ...axis, size: spec.unit === "bytes" ? 64 : 50, gap: 6, space: 34, filter: spec.is_log ? (_, splits) => splits : undefined, splits: spec.is_log ? (_, index, low, high) => decades(low, high) : undefined, values: (_, ticks) => axisMarks(ticks, spec.unit) },
        ],
        series: [{}, ...this.lines()],
        bands: this.bands(),
        hooks: { setCursor: [(u) => this.tell(u.cursor.idx)], draw: [(u) => this.drawEvals(u)] },
      };
    }

    // The spread of a line, or the layers of a stack: each between its sum and the sum below.
    bands() {
      const { spec } = this;
      const count = spec.series.length;
      if (spec.is_stacked) {
        const drawn = [...spec.series].reverse().slice(0, -1);
        return drawn.map((s, i) => ({ series: [i + 1, i + 2], fill: faded(tone(s.tone), 0.6) }));
      }
      return spec.band ? [{ series: [2 * count + 1, 2 * count + 2], fill: faded(tone(spec.series[0].tone), 0.15) }] : [];
    }

    xRange(low, high) {
      if (this.maxSteps && this.chart === undefined) return [0, this.maxSteps];
      const steps = this.data[0];
      const isWhole = low === null || (steps.length && low <= steps[0] && high >= steps[steps.length - 1]);
      return this.maxSteps && isWhole ? [0, Math.max(this.maxSteps, high || 0)] : [low, high === low ? low + 1 : high];
    }

    yRange(low, high) {
      for (const [, mean, below, above] of this.evals) {
        low = Math.min(low ?? mean, below ?? mean);
        high = Math.max(high ?? mean, above ?? mean);
      }
      if (low === null || high === null) return [0, 1];
      if (this.spec.id === "reward" && low >= 0 && high <= 1) return [0, 1.02];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [this.spec.floor === 0 && low >= 0 ? 0 : low - room, high + room];
    }

    drawEvals(u) {
      if (!this.evals.length) return;
      const { ctx } = u;
      const pixels = devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = tone("ink");
      ctx.lineWidth = 1.5 * pixels;
      for (const [step, mean, low, high] of this.evals) {
        const x = u.valToPos(step, "x", true);
        if (x < u.bbox.left - 1 || x > u.bbox.left + u.bbox.width + 1) continue;
        if (low !== null && high !== null) {
          const cap = 4 * pixels;
          ctx.beginPath();
          for (const y of [low, high].map((v) => u.valToPos(v, "y", true))) { ctx.moveTo(x - cap, y); ctx.lineTo(x + cap, y); }
          ctx.moveTo(x, u.valToPos(low, "y", true));
          ctx.lineTo(x, u.valToPos(high, "y", true));
          ctx.stroke();
        }
        ctx.beginPath();
        ctx.arc(x, u.valToPos(mean, "y", true), 4 * pixels, 0, 7);
        ctx.fill();
        ctx.save(); ctx.strokeStyle = tone("surface"); ctx.stroke(); ctx.restore();
      }
      ctx.restore();
    }

    // Writes the values under the cursor, or the newest ones, beside the title.
    tell(index) {
      const steps = this.data ? this.data[0] : [];
      const parts = [];
      const entry = (toneName, label, value, isDot) => {
        const part = element("span", isDot ? "dot" : "");
        const key = element("i", `tone-line-${toneName}`);
        part.append(key, `${label} `, element("b", "", figure(value, this.spec.unit)));
        parts.push(part);
      };
      const isPointing = index !== null && index !== undefined;
      if (isPointing) parts.push(element("span", "", `${this.spec.x || "step"} ${steps[index]}`));
      this.spec.series.forEach((s, i) => {
        const column = this.values[i] || [];
        const value = isPointing ? column[index] : column.findLast((v) => v !== null);
        if (value !== undefined && (value !== null || isPointing)) entry(s.tone, s.label, value, false);
      });
      if (this.spec.band && this.values[0].length) {
        const part = element("span", "band");
        part.append(element("i", `tone-line-${this.spec.series[0].tone}`), "10th to 90th percentile");
        parts.push(part);
      }
      if (this.evals.length) {
        const done = isPointing ? this.evals.filter((e) => e[0] <= steps[index]) : this.evals;
        if (done.length) entry("ink", "held out", done[done.length - 1][1], true);
      }
      this.readout.replaceChildren(...parts);
    }
  }

  window.MettleChart = MettleChart;
  window.axisMarks = axisMarks;
  window.readData = (id) => JSON.parse(document.getElementById(id).textContent);
})();
