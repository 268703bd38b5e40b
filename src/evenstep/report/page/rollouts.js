// One rollout at a time: what is known of it, then its segments with trained tokens marked.
function segmentStrip(segment, longest, available) {
  const token = available / Math.max(1, longest);
  const strip = svg("svg", { width: available, height: 16, role: "img", "aria-label": counted(segment.tokens, "token") + ", " + segment.trained + " of them trained" });
  let at = 0;
  for (const [isTrained, , tokens] of segment.runs) {
    strip.append(svg("rect", { x: at * token, y: isTrained ? 0 : 5, width: Math.max(tokens * token, 0.5), height: isTrained ? 16 : 6, fill: isTrained ? "var(--c1)" : "var(--soft)" }));
    at += tokens;
  }
  if (segment.numLeftOut) strip.append(svg("rect", { class: "filler", x: at * token, y: 4, width: segment.numLeftOut * token, height: 8, fill: "var(--pad)" }));
  return strip;
}

function segmentBox(segment, index, longest, available) {
  const began = index === 0 && !segment.reason ? "the rollout's beginning" : segment.reason ? "new after " + segment.reason : "a branch";
  const title = "segment " + index + " · " + began + " · " + counted(segment.tokens, "token") + ", " + segment.trained + " trained · " +
    (segment.calls.length === 1 ? "call " : "calls ") + segment.calls.join(", ");
  const text = html("pre", { dir: "auto", tabindex: 0 }, segment.runs.map(([isTrained, content]) =>
    isTrained ? html("mark", { class: "trained" }, content) : html("span", {}, content)));
  if (segment.numLeftOut) text.append(html("span", { class: "break" }, " … " + counted(segment.numLeftOut, "more token") + " not shown"));
  return html("div", { class: "segment" }, [html("h4", {}, title), html("div", { style: "padding:6px 12px 0" }, segmentStrip(segment, longest, available)), text]);
}

function showRollout(rollout) {
  const host = document.getElementById("rollout");
  const longest = Math.max(1, ...rollout.segments.map((segment) => segment.tokens));
  const available = Math.max(200, host.clientWidth - 30);
  const advantage = rollout.advantage === null ? "– " + rollout.advantageNote : (rollout.advantage > 0 ? "+" : "") + figure(rollout.advantage) + ", on each of its trained tokens";
  const boxes = [];
  rollout.segments.forEach((segment, index) => {
    if (index && segment.reason) boxes.push(html("p", { class: "break" }, "↓ " + segment.reason + ": the prompt was written anew, so a new row begins"));
    boxes.push(segmentBox(segment, index, longest, available));
  });
  const trained = rollout.segments.reduce((sum, segment) => sum + segment.trained, 0);
  host.replaceChildren(
    facts([
      ["Status", html("span", { class: "status" }, rollout.status)],
      ["Reward", figure(rollout.reward)],
      ["Advantage", advantage],
      ["Segments, so rows", whole(rollout.numSegments)],
      ["Calls", whole(rollout.numCalls) + (rollout.numRejected ? ", " + rollout.numRejected + " rejected" : "")],
      ["Trained tokens", rollout.segments.length < rollout.numSegments ? "–" : whole(trained)],
      ["Collection and its first window", (rollout.collection ?? "–") + ", " + (rollout.window ?? "–")],
      ["Prompt", rollout.prompt],
      ["Group", rollout.group],
      ["What the environment says", rollout.info, true],
      ...(rollout.statusReason ? [["Why it is " + rollout.status, rollout.statusReason, true]] : []),
      ...(rollout.problem ? [["Its calls make no segments", rollout.problem, true]] : []),
    ]),
    html("div", { style: "margin-top:12px" }, boxes.length ? boxes : html("p", {}, "It has no segments.")));
  if (rollout.segments.length < rollout.numSegments) host.append(html("p", { class: "soft" }, (rollout.numSegments - rollout.segments.length) + " more segments are not shown."));
}

function startRollouts() {
  const chooser = document.getElementById("rollout-chooser");
  if (!DATA.rollouts.length) {
    chooser.replaceWith(html("p", {}, "There is no rollout to show."));
    return;
  }
  const select = html("select", { id: "rollout-select", "aria-label": "Rollout" });
  let group = null;
  DATA.rollouts.forEach((rollout, at) => {
    const title = rollout.collection === null ? rollout.file : "collection " + rollout.collection + ", window " + rollout.window;
    if (group === null || group.label !== title) {
      group = html("optgroup", { label: title });
      select.append(group);
    }
    group.append(html("option", { value: at }, rollout.why + " · " + counted(rollout.numSegments, "segment") + " · reward " + figure(rollout.reward) + " · " + rollout.id));
  });
  const last = DATA.rollouts.length - 1;
  const previous = html("button", { type: "button", id: "rollout-previous", "aria-label": "Previous rollout" }, "←");
  const next = html("button", { type: "button", id: "rollout-next", "aria-label": "Next rollout" }, "→");
  let now = 0;
  const show = (at, isAsked) => {
    now = Math.min(last, Math.max(0, at));
    select.value = String(now);
    previous.disabled = now === 0;
    next.disabled = now === last;
    showRollout(DATA.rollouts[now]);
    if (isAsked) toHash("rollout", DATA.rollouts[now].id);
  };
  previous.addEventListener("click", () => show(now - 1, true));
  next.addEventListener("click", () => show(now + 1, true));
  select.addEventListener("change", () => show(Number(select.value), true));
  chooser.append(previous, select, next);
  const follow = () => {
    const at = DATA.rollouts.findIndex((rollout) => rollout.id === fromHash("rollout"));
    if (at < 0) return false;
    show(at, false);
    document.getElementById("rollouts").scrollIntoView();
    return true;
  };
  window.addEventListener("hashchange", follow);
  if (!follow()) show(0, false);
  redraws.push(() => show(now, false));
}
