// Curves of several runs over one axis of steps: each run brings its own steps.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const { charts, runs } = readData("charts-data");
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  for (const spec of charts) {
    const columns = {};
    runs.forEach((run, number) => {
      const values = new Map(run.steps.map((step, i) => [step, run.columns[spec.key][i]]));
      columns[`${spec.key}:${number}`] = steps.map((step) => values.get(step) ?? null);
    });
    new MettleChart(document.querySelector(`[data-chart="${spec.id}"]`), spec).set(steps, columns, null, null);
  }
});
