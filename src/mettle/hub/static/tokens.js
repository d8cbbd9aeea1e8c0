// Sampled tokens: what is under the pointer or the keyboard is told at the side. One token is a tab stop, arrows move.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const fact = (name) => document.querySelector(`[data-fact="${name}"]`);
  let kept = null;

  function show(token) {
    if (!token) return;
    fact("text").textContent = JSON.stringify(token.textContent.replaceAll("\u21b5\n", "\n"));
    fact("id").textContent = token.dataset.id;
    fact("p").textContent = token.dataset.p;
    fact("lp").textContent = token.dataset.lp;
    fact("v").textContent = `policy v${token.dataset.v}`;
    fact("a").textContent = token.dataset.a ?? "none";
    fact("m").textContent = token.dataset.m ?? "not known";
    for (const [name, value] of [["r", token.dataset.r], ["k", token.dataset.k]]) {
      if (fact(name)) fact(name).textContent = value ?? "not trained";
    }
    if (kept) kept.classList.remove("on");
    kept = token;
    token.classList.add("on");
  }

  for (const stream of document.querySelectorAll("[data-tokens]")) {
    const tokens = [...stream.querySelectorAll(".t")];
    if (!tokens.length) continue;
    tokens[0].tabIndex = 0;
    stream.addEventListener("pointerover", (event) => show(event.target.closest(".t")));
    stream.addEventListener("focusin", (event) => show(event.target.closest(".t")));
    stream.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (!(event.key in steps)) return;
      const next = tokens[tokens.indexOf(event.target.closest(".t")) + steps[event.key]];
      if (!next) return;
      event.preventDefault();
      next.tabIndex = 0;
      next.focus();
    });
  }
  const lowest = [...document.querySelectorAll(".t")].sort((a, b) => a.dataset.lp - b.dataset.lp)[0];
  show(lowest);
});
