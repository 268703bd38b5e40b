// Curves over windows: one figure per unit, read by pointer or arrow keys.
const DASHES = ["", "6 3", "2 3"];
const CHART_HEIGHT = 190;
const EDGE = { left: 54, right: 12, top: 8, bottom: 34 };

function ticks(least, most, about) {
  const raw = (most - least) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(least / step - 1e-9) * step; at <= most + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// The curves of a chart: points with window, mean, least, most; only those with values.
function linesOf(chart, source) {
  return chart.lines.filter((line) => source.metrics[line.key]).map((line, at) => {
    const metric = source.metrics[line.key];
    const band = line.band ? source.metrics[line.band] : null;
    const points = metric.mean.map((mean, i) => {
      const around = band && mean !== null ? band.mean[i] : null;
      return {
        first: source.first[i], last: source.last[i], mean,
        least: metric.least ? metric.least[i] : null, most: metric.most ? metric.most[i] : null,
        around,
      };
    });
    return { label: line.label, bandLabel: line.band ? "standard deviation" : null, points, at };
  });
}

function range(lines, isFromZero, isShare) {
  let least = Infinity, most = -Infinity;
  for (const { points } of lines) {
    for (const p of points) {
      if (p.mean === null) continue;
      least = Math.min(least, p.least ?? p.mean, p.around === null ? p.mean : p.mean - p.around);
      most = Math.max(most, p.most ?? p.mean, p.around === null ? p.mean : p.mean + p.around);
    }
  }
  if (isFromZero) { least = Math.min(0, least); most = Math.max(0, most); }
  if (least === most) { most = least + (Math.abs(least) || 1); }
  const room = (most - least) * 0.06;
  // a share ends at 100 %; with shared beginnings there are more real tokens than places
  const top = isShare && most <= 1 ? 1.0001 : Infinity;
  if (!isFromZero || least < 0) least -= room;
  most = Math.min(most + room, top);
  if (isShare) least = Math.max(least, 0);
  return [least, most];
}

const middle = (point) => (point.first + point.last) / 2;
const span = (point) => (point.first === point.last ? "window " + point.first : "windows " + point.first + " to " + point.last);

function valueText(chart, line, point) {
  const shown = (value) => (chart.is_share ? share(value) : figure(value, chart.unit));
  let text = line.label + " " + shown(point.mean);
  if (point.around !== null) text += " ± " + shown(point.around);
  if (point.least !== null && point.least !== point.most) text += " (" + shown(point.least) + " to " + shown(point.most) + ")";
  return text;
}

function drawChart(host, chart, source, readout, state) {
  const lines = linesOf(chart, source);
  const width = Math.max(240, host.clientWidth);
  const [least, most] = range(lines, chart.is_from_zero, chart.is_share);
  const all = lines[0].points;
  const low = middle(all[0]), high = middle(all[all.length - 1]);
  const x = (window) => (low === high ? (EDGE.left + width - EDGE.right) / 2 :
    EDGE.left + (window - low) / (high - low) * (width - EDGE.left - EDGE.right));
  const y = (value) => CHART_HEIGHT - EDGE.bottom - (value - least) / (most - least) * (CHART_HEIGHT - EDGE.bottom - EDGE.top);
  const image = svg("svg", {
    width, height: CHART_HEIGHT, viewBox: "0 0 " + width + " " + CHART_HEIGHT, role: "img", tabindex: 0,
    "aria-label": chart.title + " over windows " + all[0].first + " to " + all[all.length - 1].last + ", " + chart.unit,
  });
  for (const at of ticks(least, most, 4)) {
    image.append(
      svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: y(at), y2: y(at) }),
      svg("text", { class: "soft", x: EDGE.left - 6, y: y(at) + 4, "font-size": 11, "text-anchor": "end" },
        chart.is_share ? String(Number((100 * at).toPrecision(4))) : chart.unit === "bytes" ? figure(at, "bytes") : shortTick(at)));
  }
  for (const at of low === high ? [low] : ticks(low, high, Math.max(2, width / 90)).filter(Number.isInteger)) {
    image.append(svg("text", { class: "soft", x: x(at), y: CHART_HEIGHT - 18, "font-size": 11, "text-anchor": "middle" }, whole(at)));
  }
  image.append(
    svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: CHART_HEIGHT - EDGE.bottom, y2: CHART_HEIGHT - EDGE.bottom }),
    svg("text", { class: "soft", x: (EDGE.left + width - EDGE.right) / 2, y: CHART_HEIGHT - 4, "font-size": 11, "text-anchor": "middle" }, "window"));
  for (const window of source.skipped || []) {
    const at = x(window), foot = CHART_HEIGHT - EDGE.bottom;
    image.append(svg("path", { class: "skipmark", d: "M" + at + " " + (foot - 6) + "l4 6h-8z" }, svg("title", {}, "window " + window + " took no optimizer step")));
  }
  for (const line of lines) {
    const colour = "var(--c" + line.at % 3 + ")";
    const inside = (value) => Math.min(Math.max(value, least), most);
    const edges = (p) => p.around !== null ? [p.mean - p.around, p.mean + p.around] : p.least !== null ? [p.least, p.most] : null;
    for (const stretch of stretchesOf(line.points)) {
      const banded = stretch.filter((p) => edges(p));
      if (banded.length) {
        const upper = banded.map((p) => x(middle(p)) + " " + y(inside(edges(p)[1])));
        const lower = banded.map((p) => x(middle(p)) + " " + y(inside(edges(p)[0]))).reverse();
        image.append(svg("path", { class: "band", fill: colour, d: "M" + [...upper, ...lower].join("L") + "Z" }));
      }
      image.append(svg("path", { class: "curve", stroke: colour, "stroke-dasharray": DASHES[line.at % 3] || null,
        d: "M" + stretch.map((p) => x(middle(p)).toFixed(1) + " " + y(p.mean).toFixed(1)).join("L") }));
      if (stretch.length === 1 || line.points.length <= 12) {
        for (const p of stretch) image.append(svg("circle", { cx: x(middle(p)), cy: y(p.mean), r: 2.6, fill: colour }));
      }
    }
  }
  const cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: CHART_HEIGHT - EDGE.bottom, visibility: "hidden" });
  const dots = lines.map((line) => svg("circle", { r: 4, fill: "var(--c" + line.at % 3 + ")", visibility: "hidden" }));
  image.append(cursor, ...dots);

  function show(at) {
    state.at = at;
    const place = x(middle(all[at]));
    withAttributes(cursor, { x1: place, x2: place, visibility: "visible" });
    lines.forEach((line, i) => {
      const value = line.points[at].mean;
      withAttributes(dots[i], value === null ? { visibility: "hidden" } : { cx: place, cy: y(value), visibility: "visible" });
    });
    readout.textContent = span(all[at]) + ": " + lines.map((line) => valueText(chart, line, line.points[at])).join("; ");
  }
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const pointed = (event.clientX - box.left) / box.width * width;
    let best = 0;
    all.forEach((p, i) => { if (Math.abs(x(middle(p)) - pointed) < Math.abs(x(middle(all[best])) - pointed)) best = i; });
    show(best);
  });
  image.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -all.length, End: all.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.min(all.length - 1, Math.max(0, (state.at ?? all.length - 1) + moves[event.key])));
  });
  host.replaceChildren(image);
  show(state.at ?? all.length - 1);
}

function shortTick(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

// Where a metric has no value its curve is broken.
function stretchesOf(points) {
  const found = [[]];
  for (const point of points) {
    if (point.mean !== null) found[found.length - 1].push(point);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter((stretch) => stretch.length);
}

function addChart(parent, chart, source) {
  const lines = linesOf(chart, source);
  if (!lines.length || !source.first.length) return;
  const id = "chart-" + parent.children.length;
  const host = html("div", {});
  const readout = html("p", { class: "readout", id: id + "-values", "aria-live": "polite" });
  const keys = lines.map((line) => html("span", { class: "key soft" }, [
    svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, svg("line", {
      x1: 0, x2: 26, y1: 4, y2: 4, stroke: "var(--c" + line.at % 3 + ")", "stroke-width": 2.2, "stroke-dasharray": DASHES[line.at % 3] || null })),
    line.label + (line.bandLabel ? ", ± " + line.bandLabel : ""),
  ]));
  const unit = html("span", { class: "soft" }, " · " + chart.unit);
  const state = { at: null };
  parent.append(html("figure", { id, "data-title": chart.title }, [
    html("figcaption", {}, [chart.title, unit]), html("div", { class: "soft", style: "font-size:.8rem" }, lines.length > 1 || lines[0].bandLabel ? keys : null), host, readout]));
  const draw = () => drawChart(host, chart, source, readout, state);
  draw();
  redraws.push(draw);
}

const redraws = [];

function drawCharts() {
  const parent = document.getElementById("charts");
  addChart(parent, {
    title: "Held-out reward", unit: "mean reward of an evaluation", is_from_zero: false, is_share: false,
    lines: [
      { key: "eval_reward_mean", label: "all tasks" },
      { key: "eval_long_reward_mean", label: "tasks of 3+ segments" },
      { key: "eval_floor", label: "floor: most common answer" },
    ],
  }, DATA.evaluations);
  const source = { ...DATA.curves, skipped: DATA.skipped };
  for (const chart of DATA.charts) addChart(parent, chart, source);
  if (!parent.children.length) parent.append(html("p", {}, "No window has been trained yet."));
}

function fillWindowTable(host) {
  const { first, last, metrics } = DATA.curves;
  const names = Object.keys(metrics);
  const isMean = first.some((window, i) => window !== last[i]);
  const lines = first.map((window, i) => [
    window === last[i] ? String(window) : window + "–" + last[i],
    ...names.map((name) => (metrics[name].mean[i] === null ? "–" : String(metrics[name].mean[i])))]);
  host.replaceChildren(table([isMean ? "windows (means of each stretch)" : "window", ...names], lines));
}
