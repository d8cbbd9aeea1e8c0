// The metrics browser: draws a chart when it comes into view; the filter is a regular expression, or plain words.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const holder = document.querySelector("[data-metrics]");
  if (!holder) return;
  const { steps, columns } = readData("metrics-data");
  const figures = [...holder.querySelectorAll("[data-metric]")];
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      const name = target.dataset.metric;
      const rows = steps.map((_, i) => i).filter((i) => columns[name][i] !== null);
      const chart = new MettleChart(target, { id: name, unit: name.endsWith("bytes") ? "bytes" : "", series: [{ key: name, label: "", tone: "steel" }] });
      chart.set(rows.map((i) => steps[i]), { [name]: rows.map((i) => columns[name][i]) }, null, null);
    }
  }, { rootMargin: "200px" });
  figures.forEach((f) => seen.observe(f));

  const box = document.querySelector("[data-filter]");
  const filter = () => {
    let test;
    try {
      const pattern = new RegExp(box.value, "i");
      test = (name) => pattern.test(name);
    } catch {
      test = (name) => name.includes(box.value);
    }
    for (const f of figures) f.hidden = !test(f.dataset.metric);
    document.querySelector("[data-count]").textContent = figures.filter((f) => !f.hidden).length;
  };
  box.addEventListener("input", filter);
  box.value = new URLSearchParams(location.search).get("filter") || "";
  filter();
});
