// The overview while a run goes on: asks once a second for what has changed, and redraws that.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector("[data-live]");
  const { charts: specs, live } = readData("charts-data");
  const charts = specs.map((spec) => [spec, new MettleChart(document.querySelector(`[data-chart="${spec.id}"]`), spec)]);
  const fragments = new Map([...page.querySelectorAll("[data-fragment]")].map((e) => [e.dataset.fragment, e]));
  const shown = new Map();
  const lost = page.querySelector("[data-lost]");
  const OVERLAP = 3; // newest steps asked for again: the trainer's figures of a step come after the orchestrator's
  let rows = new Map();
  let state = { change: -1, revision: live.revision, isLive: live.is_live };

  function merge({ steps, columns }) {
    const names = Object.keys(columns);
    steps.forEach((step, i) => rows.set(step, Object.fromEntries(names.map((name) => [name, columns[name][i]]))));
  }

  function draw({ evals, max_steps: maxSteps, warm_up: warmUp }) {
    const steps = [...rows.keys()].sort((a, b) => a - b);
    for (const [spec, chart] of charts) {
      if (spec.id.startsWith("warm_up")) {
        if (warmUp) chart.set(warmUp.steps, warmUp.columns, null, null);
        continue;
      }
      const wanted = [...spec.series.map((s) => s.key), ...(spec.band || [])];
      const columns = Object.fromEntries(wanted.map((key) => [key, steps.map((step) => rows.get(step)[key] ?? null)]));
      chart.set(steps, columns, spec.id === "reward" ? evals : null, maxSteps);
    }
  }

  function take(answer) {
    state.change = answer.change;
    state.isLive = answer.is_live;
    if ("is_warming" in answer) page.dataset.stage = answer.is_warming ? "warming" : "training";
    if (!answer.fragments) return;
    for (const [name, html] of Object.entries(answer.fragments)) {
      // The server's own template, escaped there as on the page itself.
      if (shown.get(name) !== html) { fragments.get(name).innerHTML = html; shown.set(name, html); }
    }
    if (answer.revision !== state.revision) {
      state.revision = answer.revision;
      rows = new Map();
      return; // earlier steps may have been written again: the next answer brings all of them
    }
    merge(answer);
    draw(answer);
  }

  async function poll() {
    let pause = state.isLive ? 1000 : 10000;
    if (!document.hidden) {
      const newest = rows.size ? Math.max(...rows.keys()) - OVERLAP : -1;
      try {
        const answer = await fetch(`${page.dataset.live}?after_step=${newest}&change=${state.change}`);
        if (!answer.ok) throw new Error(String(answer.status));
        take(await answer.json());
        lost.hidden = true;
      } catch {
        lost.hidden = false;
        pause = 4000;
      }
    }
    setTimeout(poll, pause);
  }

  merge(live);
  draw(live);
  setTimeout(poll, 1000);
});
