"use strict";
const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Smoothing is linear, so it may work on the places of the points as they are drawn.
const lines = [...document.querySelectorAll("path.smooth")].map((path) => ({
  path,
  points: path.previousElementSibling.getAttribute("d").slice(1).split("L")
    .map((point) => point.split(" ").map(Number)),
}));

function smoothed(points, weight) {
  let total = 0;
  let whole = 0;
  return points.map(([x, y]) => {
    total = weight * total + (1 - weight) * y;
    whole = weight * whole + (1 - weight);
    return `${x} ${(total / whole).toFixed(1)}`;
  });
}

const slider = document.getElementById("smoothing");
if (slider && lines.length) {
  document.getElementById("smoothing-label").hidden = false;
  slider.addEventListener("input", () => {
    const weight = Number(slider.value);
    document.getElementById("smoothing-value").textContent = weight.toFixed(2);
    for (const { path, points } of lines) path.setAttribute("d", "M" + smoothed(points, weight).join("L"));
  });
}
