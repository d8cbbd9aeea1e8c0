// Light or dark: the system's choice until the button has been used. Runs before the first paint.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const asked = new URLSearchParams(location.search).get("theme");
  const apply = () => { root.dataset.theme = asked || kept() || (system.matches ? "dark" : "light"); };
  const tell = () => window.dispatchEvent(new Event("themechange"));
  apply();
  system.addEventListener("change", () => { apply(); tell(); });
  document.addEventListener("DOMContentLoaded", () => {
    // On a telephone the tab that is open may stand beyond the edge of the bar.
    const open = document.querySelector(".bar .tabs [aria-current]");
    if (open) open.parentElement.scrollLeft = open.offsetLeft - open.parentElement.offsetLeft - 60;
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
        try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a private window keeps nothing */ }
        tell();
      });
    }
  });
})();
