// The plan of one step: ranks as lanes, micro-batches from left to right, rows in their cells.
// Eight colours that colour-blind readers can tell apart, each with the colour of its label.
const GROUP_COLOURS = [
  ["#0072b2", "#fff"], ["#e69f00", "#000"], ["#006d4e", "#fff"], ["#cc79a7", "#000"],
  ["#56b4e9", "#000"], ["#b34700", "#fff"], ["#f0e442", "#000"], ["#5b4a99", "#fff"],
];
const PLAN = { gutter: 68, head: 22, caption: 18, gap: 10, laneGap: 14, fillerTokens: 2, leastColumn: 136, leastLabel: 72, line: 22 };
const planState = { at: 0, zoom: 1, group: null };

const groupLabel = (group) => "g" + group;
const rolloutOf = (plan, i) => plan.rollouts[plan.r[i]];
const rowLabel = (plan, i) => groupLabel(plan.g[i]) + "·r" + rolloutOf(plan, i)[1] + "·s" + plan.s[i];
const isOverlong = (plan, i) => plan.overlong.includes(i);

// Fillers that a cell runs beside its rows.
function fillersOf(plan, cell) {
  if (plan.cellRows !== null) return plan.cellRows - cell.length;
  return cell.length ? 0 : 1;
}

// Pixels: how wide each column is, how high each lane, and what one token takes.
function measure(plan, available) {
  const columns = plan.cells[0].map((_, k) => Math.max(PLAN.fillerTokens, ...plan.widths.map((rank) => rank[k])));
  const room = available - PLAN.gutter - PLAN.gap * columns.length;
  if (!plan.isStacked) {
    const column = Math.max(PLAN.leastColumn, room / columns.length) * planState.zoom;
    const sorted = [...plan.n].sort((a, b) => a - b);
    const token = Math.min(column / Math.max(1, sorted[sorted.length - 1] || 1), 80 * planState.zoom / Math.max(1, sorted[sorted.length >> 1] || 1));
    const perLine = Math.max(1, Math.floor(column / token));
    const lanes = plan.widths.map((rank) => Math.max(...rank.map((width) => Math.ceil(Math.max(width, 1) / perLine))) * PLAN.line);
    return { columns: columns.map(() => column), lanes, token, perLine };
  }
  const total = columns.reduce((sum, width) => sum + width, 0);
  const usual = [...plan.n].sort((a, b) => a - b)[plan.n.length >> 1] || 1;
  const token = Math.max(room / total, PLAN.leastLabel / usual) * planState.zoom;
  const most = plan.cells.map((rank) => Math.max(...rank.map((cell) => cell.length + fillersOf(plan, cell))));
  const rows = most.reduce((sum, count) => sum + count, 0);
  const line = Math.min(20, Math.max(4, Math.max(11, Math.min(20, 700 / rows)) * Math.min(1, 2400 / (11 * rows)))) * planState.zoom;
  return { columns: columns.map((width) => Math.max(width * token, PLAN.leastColumn * planState.zoom)), lanes: most.map((count) => count * line), token, line };
}

function drawPlan(plan, available) {
  const size = measure(plan, available);
  const width = PLAN.gutter + size.columns.reduce((sum, column) => sum + column + PLAN.gap, 0);
  const height = PLAN.head + size.lanes.reduce((sum, lane) => sum + lane + PLAN.caption + PLAN.laneGap, 0);
  const image = svg("svg", {
    width: Math.ceil(width), height: Math.ceil(height), viewBox: "0 0 " + Math.ceil(width) + " " + Math.ceil(height), role: "img", tabindex: 0,
    id: "plan-picture", "aria-label": "Plan of window " + plan.window + ": " + counted(plan.numRanks, "rank") + ", " +
      plan.cells[0].length + " micro-batches each, " + counted(plan.stats.num_rows, "row") + ", " + counted(plan.stats.num_fillers, "filler"),
  });
  image.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, [
    svg("rect", { width: 7, height: 7, fill: "var(--back)" }), svg("line", { x1: 0, y1: 0, x2: 0, y2: 7, stroke: "var(--hatch)", "stroke-width": 3 })])));
  let left = PLAN.gutter;
  plan.cells[0].forEach((_, k) => {
    image.append(svg("text", { class: "soft", x: left, y: 14, "font-size": 12 }, "micro-batch " + k));
    left += size.columns[k] + PLAN.gap;
  });
  let top = PLAN.head;
  plan.cells.forEach((rank, r) => {
    image.append(svg("text", { x: 8, y: top + 14, "font-size": 13, "font-weight": 600 }, "rank " + r));
    left = PLAN.gutter;
    rank.forEach((cell, k) => {
      drawCell(image, plan, cell, plan.widths[r][k], { left, top, width: size.columns[k], lane: size.lanes[r], ...size });
      left += size.columns[k] + PLAN.gap;
    });
    top += size.lanes[r] + PLAN.caption + PLAN.laneGap;
  });
  return image;
}

function drawCell(image, plan, cell, width, box) {
  const caption = svg("text", { class: "soft", x: box.left, "font-size": 11 }, captionOf(plan, cell, width));
  if (!plan.isStacked) {
    drawLines(image, plan, cell, width, box);
    caption.setAttribute("y", box.top + Math.max(1, Math.ceil(width / box.perLine)) * PLAN.line + 13);
  } else {
    const shown = Math.max(width, PLAN.fillerTokens) * box.token;
    const count = cell.length + fillersOf(plan, cell);
    if (width) image.append(svg("rect", { class: "cell", x: box.left, y: box.top, width: shown, height: count * box.line }));
    cell.forEach((i, line) => drawRow(image, plan, i, { x: box.left, y: box.top + line * box.line, width: plan.n[i] * box.token, height: box.line }));
    for (let line = cell.length; line < count; line++) {
      drawFiller(image, { x: box.left, y: box.top + line * box.line, width: shown, height: box.line });
    }
    caption.setAttribute("y", box.top + count * box.line + 13);
  }
  image.append(caption);
}

// Layouts without padding: rows end to end, in lines like text.
function drawLines(image, plan, cell, width, box) {
  if (!cell.length) {
    drawFiller(image, { x: box.left, y: box.top, width: Math.max(PLAN.fillerTokens * box.token, 56), height: PLAN.line });
    return;
  }
  for (let from = 0; from < width; from += box.perLine) {
    image.append(svg("rect", { class: "cell", x: box.left, y: box.top + from / box.perLine * PLAN.line, width: Math.min(box.perLine, width - from) * box.token, height: PLAN.line - 2 }));
  }
  let at = 0;
  for (const i of cell) {
    let rest = plan.n[i], isFirst = true;
    while (rest > 0) {
      const column = at % box.perLine, part = Math.min(rest, box.perLine - column);
      drawRow(image, plan, i, { x: box.left + column * box.token, y: box.top + Math.floor(at / box.perLine) * PLAN.line, width: part * box.token, height: PLAN.line - 2 }, !isFirst);
      at += part;
      rest -= part;
      isFirst = false;
    }
    if (plan.layout === "packed") at += Math.ceil(plan.n[i] / plan.multiple) * plan.multiple - plan.n[i];
  }
}

function drawRow(image, plan, i, place, isContinued) {
  const group = plan.g[i];
  const [fill, ink] = GROUP_COLOURS[group % GROUP_COLOURS.length];
  const over = isOverlong(plan, i);
  const isDimmed = planState.group !== null && planState.group !== group;
  const label = (over ? "! " : "") + rowLabel(plan, i);
  const row = svg("rect", { class: "row" + (over ? " over" : "") + (isDimmed ? " dimmed" : ""), "data-row": i, x: place.x, y: place.y, width: Math.max(place.width, 1), height: place.height, fill }, svg("title", {}, rowText(plan, i)));
  image.append(row);
  const size = Math.min(12, place.height - 2);
  if (size >= 8 && place.width > label.length * size * 0.56 && !isContinued && !isDimmed) {
    image.append(svg("text", { class: "rowlabel", style: "--label:" + ink, x: place.x + 4, y: place.y + place.height / 2 + size * 0.36, "font-size": size }, label));
  }
}

function drawFiller(image, place) {
  image.append(svg("rect", { class: "filler", fill: "url(#hatch)", ...place, width: Math.max(place.width, 6) }, svg("title", {}, "filler: inert, zero weight")));
  if (place.height >= 9) {
    const right = place.x + Math.max(place.width, 6);
    const isInside = place.width > 52;
    image.append(svg("rect", { x: isInside ? place.x + 4 : right + 2, y: place.y + 1, width: 36, height: Math.max(1, place.height - 2), fill: "var(--back)" }));
    image.append(svg("text", { x: isInside ? place.x + 7 : right + 5, y: place.y + place.height / 2 + 4, "font-size": Math.min(11, place.height - 1) }, "filler"));
  }
}

function captionOf(plan, cell, width) {
  const of = plan.budget === null ? "" : " of " + whole(plan.budget);
  if (!cell.length) return "no row";
  if (plan.isStacked) {
    const count = plan.cellRows ?? cell.length;
    return count + " × " + whole(width) + " = " + whole(count * width) + of;
  }
  if (plan.layout === "tree") return counted(cell.length, "row") + ", " + whole(width) + " tokens drawn";
  return counted(cell.length, "row") + ", " + whole(width) + of;
}

// Tokens of a row, without the room that the plan kept for patches of images.
function tokensOf(plan, i) {
  return plan.n[i] - (plan.images ? plan.images[i] : 0);
}

function rowText(plan, i) {
  const images = plan.images && plan.images[i] ? " and " + whole(plan.images[i]) + " places for patches of images" : "";
  const over = isOverlong(plan, i) ? ", longer than the budget of " + whole(plan.budget) + ": it stands alone" : "";
  return rowLabel(plan, i) + ": " + counted(tokensOf(plan, i), "token") + images + ", " + whole(plan.t[i]) + " trained" + over + "; rollout " + rolloutOf(plan, i)[0];
}

function planFacts(plan) {
  const s = plan.stats;
  const rows = plan.rowsPerRollout.map((count, number) => [number, count]).filter(([number, count]) => number && count);
  const lost = s.footprint - s.num_tokens;
  const trained = plan.t.reduce((sum, value) => sum + value, 0);
  const isWhole = plan.cells.length === plan.numRanks;
  return facts([
    ["Rows", whole(s.num_rows) + " of " + counted(plan.numRollouts, "rollout") + " in " + counted(plan.numGroups, "group")],
    ["Micro-batches per rank, K", whole(s.num_microbatches) + " (at least " + whole(s.num_microbatches_lower_bound) + ")"],
    ["Fillers", whole(s.num_fillers) + (s.filler_footprint ? ", " + whole(s.filler_footprint) + " token places in micro-batches without a row" : "")],
    ["Real tokens", whole(s.num_tokens) + (isWhole ? ", " + whole(trained) + " trained" : "")],
    plan.layout === "tree" ? ["Run once", whole(s.footprint) + " token places, padding included"] : ["Padding", whole(lost) + " token places, " + share(s.footprint ? lost / s.footprint : 0)],
    [plan.layout === "tree" ? "Real tokens / places" : "Padding efficiency", share(s.padding_efficiency)],
    ["Budget of a micro-batch", plan.budget === null ? "none" : whole(plan.budget) + " tokens, " + share(s.fill) + " filled"],
    ["Lockstep efficiency", share(s.lockstep_efficiency)],
    ["Most loaded rank / mean", figure(s.rank_imbalance)],
    ["Over-long rows", plan.overlong.length ? whole(plan.overlong.length) + ", marked with ! and a red edge" : "none"],
    ["Layout", plan.layout + (plan.multiple > 1 ? ", widths in multiples of " + plan.multiple : "")],
    ["Rows of a rollout", rows.map(([number, count]) => whole(count) + " with " + number).join(", "), true],
  ]);
}

function planNotes(plan) {
  const notes = [];
  if (plan.cells.length < plan.numRanks) notes.push("Ranks 0 to " + (plan.cells.length - 1) + " of " + plan.numRanks + " are drawn.");
  if (plan.also.length) notes.push("Later epochs ran this plan again: " + (plan.also.length === 1 ? "window " : "windows ") + plan.also.join(", ") + ".");
  if (plan.layout === "tree") notes.push("Rows are drawn one after the other, each with all of its tokens; beginnings that they share run once.");
  if (GROUP_COLOURS.length < plan.numGroups) notes.push("Colours repeat after " + GROUP_COLOURS.length + " groups; labels do not. Press a group to see it alone.");
  return notes.map((text) => html("p", { class: "soft" }, text));
}

function groupLegend(plan, again) {
  const shown = plan.groupIds.slice(0, 48).map((id, group) => {
    const [fill, ink] = GROUP_COLOURS[group % GROUP_COLOURS.length];
    const button = html("button", { type: "button", style: "background:" + fill + ";color:" + ink + ";border-color:" + fill, title: "group " + id, "aria-pressed": String(planState.group === group) }, groupLabel(group));
    button.addEventListener("click", () => {
      planState.group = planState.group === group ? null : group;
      again();
      document.querySelectorAll("#plan .legend button")[group].focus();
    });
    return button;
  });
  const more = plan.groupIds.length - shown.length;
  return html("div", { class: "legend", role: "group", "aria-label": "Groups" }, [...shown, more > 0 ? html("span", { class: "soft" }, "and " + more + " more") : null]);
}

function sample(fill, extra, text) {
  return html("span", { class: "sample" }, [svg("svg", { width: 26, height: 14, "aria-hidden": "true" },
    svg("rect", { x: 1, y: 1, width: 24, height: 12, fill, ...extra })), text]);
}

function planTable(plan) {
  const lines = [];
  plan.cells.forEach((rank, r) => rank.forEach((cell, k) => {
    for (const i of cell) lines.push([rowLabel(plan, i), r, k, tokensOf(plan, i), plan.t[i], plan.isStacked ? plan.widths[r][k] - plan.n[i] : 0, isOverlong(plan, i) ? "yes" : "no", rolloutOf(plan, i)[0]].map(String));
    for (let f = 0; f < fillersOf(plan, cell); f++) lines.push(["filler", r, k, "–", "0", "–", "no", "–"].map(String));
  }));
  return table(["row", "rank", "micro-batch", "tokens", "trained", "padding", "over-long", "rollout"], lines);
}

function showPlan() {
  const host = document.getElementById("plan");
  const plan = DATA.plans[planState.at];
  const hadFocus = document.activeElement && document.activeElement.id === "plan-picture";
  const detail = html("p", { class: "detail", "aria-live": "polite", id: "plan-detail" }, "Point at a row, or tap it, to see which it is.");
  const picture = html("div", { class: "wide" });
  const rowTable = html("details", {}, [html("summary", {}, "Rows of this plan as a table"), html("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Rows of this plan" })]);
  rowTable.addEventListener("toggle", () => { if (rowTable.open) rowTable.lastChild.replaceChildren(planTable(plan)); });
  host.replaceChildren(html("div", { class: "plan" }, [
    planFacts(plan),
    html("div", {}, [
      sample("var(--c0)", {}, "row, colour of its group"),
      plan.layout === "tree" ? null : sample("var(--pad)", { class: "cell" }, "padding"),
      sample("url(#hatch)", { class: "filler" }, "filler, inert"),
      sample("var(--c0)", { class: "row over" }, "over-long row, alone"),
    ]),
    groupLegend(plan, showPlan), ...planNotes(plan), detail, picture, rowTable]));
  const image = drawPlan(plan, Math.max(280, picture.clientWidth - 2));
  picture.append(image);
  const point = (event) => {
    const row = event.target.getAttribute && event.target.getAttribute("data-row");
    if (row === null || row === undefined) return;
    const id = rolloutOf(plan, Number(row))[0];
    const isShown = DATA.rollouts.some((rollout) => rollout.id === id);
    detail.replaceChildren(rowText(plan, Number(row)), ...(isShown ? [" ", html("a", { href: "#rollout=" + encodeURIComponent(id) }, "Show its segments.")] : []));
  };
  image.addEventListener("pointerover", point);
  image.addEventListener("click", point);
  if (hadFocus) image.focus({ preventScroll: true });
}

function nearestPlan(window) {
  let best = 0;
  DATA.plans.forEach((plan, at) => {
    if (plan.also.includes(window)) best = at;
    else if (!DATA.plans[best].also.includes(window) && Math.abs(plan.window - window) < Math.abs(DATA.plans[best].window - window)) best = at;
  });
  return best;
}

function startPlans() {
  const stepper = document.getElementById("plan-stepper");
  if (!DATA.plans.length) {
    stepper.replaceWith(html("p", {}, "There is no plan to draw."));
    return;
  }
  const last = DATA.plans.length - 1;
  const number = html("input", { type: "number", id: "plan-window", min: DATA.plans[0].window, max: Math.max(DATA.plans[last].window, ...DATA.plans[last].also), step: 1 });
  const said = html("span", { class: "soft", "aria-live": "polite", id: "plan-said" });
  const buttons = {};
  const go = (at, asked) => {
    planState.at = Math.min(last, Math.max(0, at));
    planState.group = null;
    const plan = DATA.plans[planState.at];
    number.value = plan.window;
    const isOther = asked !== undefined && asked !== plan.window;
    const why = plan.also.includes(asked) ? "window " + asked + " ran this plan of window " + plan.window : "window " + asked + " is not in this page, this is the nearest";
    said.textContent = (planState.at + 1) + " of " + (last + 1) + (isOther ? "; " + why : "");
    buttons.first.disabled = buttons.previous.disabled = planState.at === 0;
    buttons.last.disabled = buttons.next.disabled = planState.at === last;
    toHash("plan", plan.window);
    showPlan();
  };
  const button = (name, text, label, move) => {
    buttons[name] = html("button", { type: "button", id: "plan-" + name, "aria-label": label, title: label }, text);
    buttons[name].addEventListener("click", move);
    return buttons[name];
  };
  const zoom = (factor) => () => { planState.zoom = Math.min(6, Math.max(0.5, planState.zoom * factor)); showPlan(); };
  stepper.append(
    button("first", "|←", "First plan", () => go(0)), button("previous", "←", "Previous plan", () => go(planState.at - 1)),
    html("label", { for: "plan-window" }, "window"), number,
    button("next", "→", "Next plan", () => go(planState.at + 1)), button("last", "→|", "Last plan", () => go(last)),
    button("smaller", "−", "Smaller", zoom(1 / 1.4)), button("larger", "+", "Larger", zoom(1.4)), said);
  number.addEventListener("change", () => { if (number.value !== "") go(nearestPlan(Number(number.value)), Number(number.value)); });
  document.getElementById("plans").addEventListener("keydown", (event) => {
    if (event.target === number || event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -last - 1, End: last + 1 };
    if (!(event.key in moves) || (event.target.closest(".wide") && event.target.id !== "plan-picture")) return;
    event.preventDefault();
    go(planState.at + moves[event.key]);
  });
  const follow = () => {
    const asked = fromHash("plan");
    if (asked === null || !/^\d+$/.test(asked)) return false;
    go(nearestPlan(Number(asked)), Number(asked));
    document.getElementById("plans").scrollIntoView();
    return true;
  };
  window.addEventListener("hashchange", follow);
  if (!follow()) {
    const before = location.hash;
    go(last);
    history.replaceState(null, "", before || location.pathname + location.search);
  }
  redraws.push(showPlan);
}
