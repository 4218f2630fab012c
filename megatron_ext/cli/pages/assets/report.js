"use strict";
const SIDE = 1000;
const byId = (id) => document.getElementById(id);

const theme = byId("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep();
});

/** A value as in the tables: four digits, whole numbers in full, round numbers of axes in short. */
function words(value, short = false) {
  const size = Math.abs(value);
  for (const [unit, letter] of short ? [[1e9, "G"], [1e6, "M"]] : []) {
    if (size >= unit && size < 1e3 * unit) return `${Number((value / unit).toPrecision(6))}${letter}`;
  }
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e5) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 8 });
}

/** Sums of w, w d, w d², w y, w d y over each point and those before it, at distances d. */
function moments(values, weight) {
  let [s0, s1, s2, t0, t1] = [0, 0, 0, 0, 0];
  return values.map((y) => {
    s2 = weight * (s2 + 2 * s1 + s0);
    s1 = weight * (s1 + s0);
    t1 = weight * (t1 + t0);
    s0 = weight * s0 + 1;
    t0 = weight * t0 + y;
    return [s0, s1, s2, t0, t1];
  });
}

/** The local linear regression of chart.py. */
function smoothed(raw, weight) {
  const scale = Math.max(...raw.map(Math.abs)) || 1;
  const values = raw.map((y) => y / scale);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const before = moments(values, weight);
  const after = moments([...values].reverse(), weight).reverse();
  return values.map((y, i) => {
    const [past, future] = [before[i], after[i]];
    const [s0, t0] = [past[0] + future[0] - 1, past[3] + future[3] - y];
    const [s1, s2, t1] = [past[1] - future[1], past[2] + future[2], past[4] - future[4]];
    const determinant = s0 * s2 - s1 * s1;
    const fit = determinant > 1e-12 * s0 * s2 ? (s2 * t0 - s1 * t1) / determinant : t0 / s0;
    return Math.min(Math.max(fit, low), high) * scale;
  });
}

/** A range of values with places in it, 0 to 1, and ticks at round ones. */
class Axis {
  constructor(values, { padded, log }) {
    this.log = log;
    let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [1, 1];
    if (log) [low, high] = [Math.log10(low), Math.log10(high)];
    const isFlat = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
    const flat = log ? 0.5 : Math.abs(high) / 2 || 1;
    const margin = isFlat ? flat : padded ? (high - low) / 20 : 0;
    this.low = low >= 0 && !log ? Math.max(low - margin, 0) : low - margin;
    this.high = high + margin;
  }

  share(value) {
    return ((this.log ? Math.log10(value) : value) - this.low) / (this.high - this.low);
  }

  ticks() {
    if (this.log) {
      const [first, last] = [Math.floor(this.low), Math.ceil(this.high)];
      const every = Math.ceil((last - first) / 5);
      const parts = this.high - this.low < 2 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1];
      const all = [];
      for (let power = first; power <= last; power += every) {
        all.push(...parts.map((part) => Number(`${part}e${power}`)));
      }
      const inside = all.filter((value) => this.share(value) >= 0 && this.share(value) <= 1);
      if (inside.length > 1) return inside.filter((_, i) => i % Math.ceil(inside.length / 6) === 0);
      return [this.low, this.high].map((value) => Number((10 ** value).toPrecision(2)));
    }
    const rough = (this.high - this.low) / 5;
    if (!(rough > 1e-300) || !Number.isFinite(rough)) return [];
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * ([1, 2, 2.5, 5, 10].find((size) => unit * size >= rough) ?? 10);
    const ticks = [];
    for (let i = Math.ceil(this.low / step); i <= Math.floor(this.high / step); i += 1) {
      ticks.push(Number((i * step).toPrecision(12)));
    }
    return ticks;
  }
}

const clocks = JSON.parse(byId("clocks")?.textContent ?? "[]");
const AXES = ["iteration", "tokens", "seconds"];

/** What a run's clock says at an iteration: tokens (1) or seconds (2) so far. */
function clock(run, iteration, which) {
  const [iterations, ...others] = clocks[run];
  const values = others[which - 1];
  const next = iterations.findIndex((each) => each >= iteration);
  if (next < 1) return values[next < 0 ? values.length - 1 : 0];
  const part = (iteration - iterations[next - 1]) / (iterations[next] - iterations[next - 1]);
  return values[next - 1] + part * (values[next] - values[next - 1]);
}

function tick(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.plot = figure.querySelector(".plot");
    this.said = [...figure.querySelectorAll(".legend small")];
    this.last = this.said.map((element) => element.textContent);
    const { curves, smooth } = JSON.parse(figure.querySelector("script").textContent);
    let xs = [];
    this.curves = curves.map(({ run, x, y }) => ({ run, iterations: (xs = x ?? xs), y }));
    this.isSmooth = smooth;
    this.at = -1;
    this.prepare({ axis: 0, log: false, weight: null });
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    // A finger leaves when it is lifted: what it has pointed at stays until another touch.
    this.plot.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType !== "touch") this.show(-1);
    });
    this.plot.addEventListener("blur", () => this.show(-1));
    this.plot.addEventListener("keydown", (event) => this.move(event));
  }

  /** Places of all curves under the page's settings. */
  prepare({ axis, log, weight }) {
    this.axis = axis;
    for (const curve of this.curves) {
      curve.x = axis ? curve.iterations.map((each) => clock(curve.run, each, axis)) : curve.iterations;
    }
    const values = this.curves.flatMap(({ y }) => y);
    // What is never above 0 has no logarithm: the axis stays as it is.
    const positive = values.filter((value) => value > 0);
    this.log = log && positive.length > 0;
    this.xAxis = new Axis(this.curves.flatMap(({ x }) => x), { padded: false, log: false });
    this.yAxis = new Axis(this.log ? positive : values, { padded: true, log: this.log });
    this.stops = [...new Set(this.curves.flatMap(({ x }) => x))].sort((a, b) => a - b);
    this.weight = weight;
  }

  path(xs, ys) {
    const places = [];
    xs.forEach((x, i) => {
      if (this.log && ys[i] <= 0) return;
      places.push(`${Math.round(SIDE * this.xAxis.share(x))} ${Math.round(SIDE * (1 - this.yAxis.share(ys[i])))}`);
    });
    return places.length ? `M${places.join("L")}${places.length === 1 ? "h0" : ""}` : "";
  }

  draw(settings) {
    this.prepare(settings);
    const groups = this.plot.querySelectorAll("g");
    this.curves.forEach(({ x, y }, i) => {
      groups[i].querySelector(".raw, .only").setAttribute("d", this.path(x, y));
      const smooth = groups[i].querySelector(".smooth");
      if (smooth) {
        const values = smoothed(y, settings.weight);
        smooth.setAttribute("d", this.path(x, values));
        this.last[i] = words(values.at(-1));
      }
      const dots = x.map((each, j) => this.path([each], [y[j]])).join("");
      groups[i].querySelector(".dots")?.setAttribute("d", dots);
    });
    const ys = this.yAxis.ticks().map((value) => [value, 100 - 100 * this.yAxis.share(value)]);
    this.figure.querySelector(".ys").replaceChildren(
      ...ys.map(([value, place]) => tick("text", { x: "100%", y: `${place.toFixed(2)}%` }, words(value, true))),
    );
    this.plot.querySelector(".grid").setAttribute("d", ys.map(([, place]) => `M0 ${Math.round(10 * place)}h${SIDE}`).join(""));
    const xs = this.xAxis.ticks().filter((value) => this.axis === 2 || Number.isInteger(value));
    this.figure.querySelector(".xs").replaceChildren(...xs.map((value) => {
      const place = 100 * this.xAxis.share(value);
      const end = place > 95 ? "end" : place < 5 ? "begin" : "";
      return tick("text", { x: `${place.toFixed(2)}%`, y: "0.9em", class: end }, words(value, true));
    }));
    this.show(-1);
  }

  point({ clientX }) {
    const { left, width } = this.plot.getBoundingClientRect();
    const near = (clientX - left) / width;
    let best = 0;
    this.stops.forEach((stop, i) => {
      if (Math.abs(this.xAxis.share(stop) - near) < Math.abs(this.xAxis.share(this.stops[best]) - near)) best = i;
    });
    this.show(best);
  }

  move(event) {
    const last = this.stops.length - 1;
    const from = this.at < 0 ? last : this.at;
    const step = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: from - step, ArrowRight: from + step, Home: 0, End: last, Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.show(event.key === "Escape" ? -1 : Math.min(Math.max(to, 0), last));
  }

  /** Values at a stop in the legend; at -1 the last ones. */
  show(at) {
    this.at = at;
    const stop = this.stops[at];
    this.curves.forEach(({ x, y }, i) => {
      // Runs have points of their own: the value is that of the nearest one.
      let place = 0;
      x.forEach((each, j) => {
        if (Math.abs(each - stop) < Math.abs(x[place] - stop)) place = j;
      });
      const isOutside = stop < x[0] || stop > x.at(-1);
      this.said[i].textContent = at < 0 ? this.last[i] : isOutside ? "–" : words(y[place]);
    });
    const name = AXES[this.axis];
    this.figure.querySelector(".at").textContent = at < 0 ? name : `${name} ${words(stop)}`;
    const place = at < 0 ? null : Math.round(SIDE * this.xAxis.share(stop));
    this.plot.querySelector(".pointer").setAttribute("d", place === null ? "" : `M${place} 0v${SIDE}`);
  }
}

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
const controls = ["smoothing", "axis", "log", "show-raw", "show-smooth"].map(byId).filter(Boolean);

function draw() {
  const weight = Number(byId("smoothing").value);
  byId("smoothing-value").textContent = weight.toFixed(2);
  const settings = { axis: Number(byId("axis").value), log: byId("log").checked, weight };
  for (const chart of charts) chart.draw(settings);
}

/** A page that reloads itself keeps its settings; where a file has no storage, it does without. */
function keep() {
  try {
    const values = controls.map((each) => (each.type === "checkbox" ? each.checked : each.value));
    sessionStorage.setItem(location.pathname, JSON.stringify([document.documentElement.dataset.theme, ...values]));
  } catch { /* no storage */ }
}

function recall() {
  try {
    const [kept, ...values] = JSON.parse(sessionStorage.getItem(location.pathname)) ?? [];
    if (kept) document.documentElement.dataset.theme = kept;
    if (values.length !== controls.length) return;
    controls.forEach((each, i) => { each[each.type === "checkbox" ? "checked" : "value"] = values[i]; });
    draw();
  } catch { /* no storage */ }
}

for (const label of document.querySelectorAll(".scripted")) label.hidden = false;
for (const control of controls) {
  control.addEventListener("input", () => {
    draw();
    keep();
  });
}
recall();

/** A text whose pieces tell what both models expected in their place. */
class ScoredText {
  constructor(box) {
    this.pieces = [...box.children];
    this.details = JSON.parse(box.nextElementSibling.textContent);
    this.tip = box.nextElementSibling.nextElementSibling;
    this.at = -1;
    for (const name of ["mouseover", "click"]) {
      box.addEventListener(name, ({ target }) => {
        const at = this.pieces.indexOf(target);
        if (at >= 0) this.show(at);
      });
    }
    box.addEventListener("mouseleave", () => this.show(-1));
    box.addEventListener("focus", () => { if (this.at < 0) this.show(0); });
    box.addEventListener("blur", () => this.show(-1));
    box.addEventListener("keydown", (event) => {
      const last = this.pieces.length - 1;
      const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last, Escape: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.show(event.key === "Escape" ? -1 : Math.min(Math.max(to, 0), last));
    });
  }

  show(at) {
    this.pieces[this.at]?.classList.remove("on");
    this.at = at;
    this.tip.hidden = at < 0;
    if (at < 0) return;
    this.pieces[at].classList.add("on");
    const [student, teacher, ofStudent, ofTeacher] = this.details[at];
    const tables = [["student", student, ofStudent], ["teacher", teacher, ofTeacher]];
    this.tip.replaceChildren(...tables.map(([name, nats, likeliest]) => {
      const table = document.createElement("table");
      const head = table.createTHead().insertRow();
      const text = nats === null ? "not compared" : `${words(nats)} nats`;
      for (const each of [name, text]) head.append(Object.assign(document.createElement("th"), { textContent: each }));
      for (const [token, percent] of likeliest) {
        const row = table.insertRow();
        for (const each of [token, `${words(percent)}%`]) row.insertCell().textContent = each;
      }
      return table;
    }));
  }
}
for (const box of document.querySelectorAll(".scored")) new ScoredText(box);
