// Logs: stays at the end while new lines come, unless that is switched off.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const follow = document.querySelector("[data-follow]");
  if (!follow) return;
  const end = () => { const log = document.getElementById("log"); if (follow.checked) log.scrollTop = log.scrollHeight; };
  document.body.addEventListener("htmx:afterSwap", end);
  follow.addEventListener("change", end);
  end();
});
